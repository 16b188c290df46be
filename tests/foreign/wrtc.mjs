// @roamhq/wrtc, libwebrtc in Node: a tone in, the loudest sound heard and the events out.
import wrtc from "@roamhq/wrtc";
import { call } from "./caller.mjs";

const { RTCPeerConnection, RTCSessionDescription, nonstandard } = wrtc;
const { RTCAudioSource, RTCAudioSink } = nonstandard;

const source = new RTCAudioSource();
const pc = new RTCPeerConnection();
pc.addTrack(source.createTrack());
let phase = 0;
const speaking = setInterval(() => {
  const samples = Int16Array.from({ length: 480 }, () => 8000 * Math.sin((phase += (2 * Math.PI * 440) / 48000)));
  source.onData({ samples, sampleRate: 48000, bitsPerSample: 16, channelCount: 1, numberOfFrames: 480 });
}, 10);
let loudest = 0;
pc.ontrack = ({ track }) => {
  new RTCAudioSink(track).ondata = ({ samples }) => {
    for (const sample of samples) loudest = Math.max(loudest, Math.abs(sample));
  };
};
await call(pc, (answer) => new RTCSessionDescription({ type: "answer", sdp: answer }), () => loudest > 1000);
clearInterval(speaking);
console.log(JSON.stringify({ loudest }));
process.exit(0);
