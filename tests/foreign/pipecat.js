// Pipecat's client over its small WebRTC transport.
import { PipecatClient } from "@pipecat-ai/client-js";
import { SmallWebRTCTransport, WavMediaManager } from "@pipecat-ai/small-webrtc-transport";

window.begin = async (server) => {
  window.messages = [];
  window.transport = new SmallWebRTCTransport({ mediaManager: new WavMediaManager(512) }); // the default one is Daily's, from the web
  window.client = new PipecatClient({
    transport: window.transport,
    enableMic: true,
    enableCam: false,
    callbacks: {
      onTrackStarted: (track, participant) => {
        if (participant?.local || track.kind !== "audio") return;
        document.querySelector("audio").srcObject = new MediaStream([track]);
      },
      onTransportStateChanged: (state) => window.messages.push(state),
    },
  });
  await window.client.initDevices();
  // The bot of Pipecat's own protocol says that it is ready; ours speaks OpenAI's, so the promise is not awaited.
  window.client.connect({ webrtcRequestParams: { endpoint: `${server}/api/offer` } }).catch((error) => {
    window.messages.push(`failed: ${error}`);
  });
};
