// Clients in a browser, as their users call them, changed in nothing but where they call. What they heard is `heard`.
import { OpenAIRealtimeWebRTC, RealtimeAgent, RealtimeSession } from "@openai/agents-realtime";
import { WHIPClient } from "@binbat/whip-whep/whip.js";
import { PipecatClient } from "@pipecat-ai/client-js";
import { SmallWebRTCTransport, WavMediaManager } from "@pipecat-ai/small-webrtc-transport";

const agent = document.querySelector("#agent");

// Resolves to the milliseconds until the SDK holds its session for open.
export async function openai(server, key) {
  const transport = new OpenAIRealtimeWebRTC({ baseUrl: `${server}/v1/realtime/calls`, audioElement: agent });
  window.session = new RealtimeSession(new RealtimeAgent({ name: "agent", instructions: "Be kind." }), { transport });
  window.heard = { types: [], deltas: "", history: [], errors: [] };
  transport.on("*", (event) => heard.types.push(event.type));
  transport.on("audio_transcript_delta", (event) => (heard.deltas += event.delta));
  session.on("history_updated", (history) => (heard.history = history));
  session.on("error", ({ error }) => heard.errors.push(JSON.stringify(error)));
  const began = performance.now();
  await session.connect({ apiKey: key });
  return performance.now() - began;
}

// Resolves to the path of what was published.
export async function whip(server, token) {
  const microphone = await navigator.mediaDevices.getUserMedia({ audio: true });
  window.peer = new RTCPeerConnection({ bundlePolicy: "max-bundle" });
  peer.addTransceiver(microphone.getAudioTracks()[0], { direction: "sendonly" });
  window.client = new WHIPClient();
  await client.publish(peer, `${server}/whip`, token);
  return client.resourceURL.pathname;
}

export async function pipecat(server) {
  window.heard = { states: [], errors: [] };
  window.transport = new SmallWebRTCTransport({ mediaManager: new WavMediaManager(512) }); // the default one comes from the web
  window.client = new PipecatClient({
    transport,
    enableMic: true,
    enableCam: false,
    callbacks: {
      onTransportStateChanged: (state) => heard.states.push(state),
      onTrackStarted: (track, participant) => {
        if (track.kind === "audio" && !participant?.local) agent.srcObject = new MediaStream([track]);
      },
    },
  });
  await client.initDevices();
  // It resolves when the other side speaks Pipecat's RTVI protocol, which is not asked of us.
  const request = { webrtcRequestParams: { endpoint: `${server}/api/offer` } };
  client.connect(request).catch((error) => heard.errors.push(`${error}`));
}
