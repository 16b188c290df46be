// @openai/agents-realtime, changed in nothing but where it calls.
import { OpenAIRealtimeWebRTC, RealtimeAgent, RealtimeSession } from "@openai/agents-realtime";

window.begin = async (server, key) => {
  window.events = [];
  const audioElement = document.querySelector("audio");
  const transport = new OpenAIRealtimeWebRTC({ baseUrl: `${server}/v1/realtime/calls`, audioElement });
  transport.on("*", (event) => window.events.push(event.type));
  const agent = new RealtimeAgent({ name: "assistant", instructions: "Be kind." });
  window.session = new RealtimeSession(agent, { transport });
  window.session.on("error", (error) => window.events.push(`failed: ${JSON.stringify(error)}`));
  await window.session.connect({ apiKey: key });
  return transport.callId;
};
