// werift, WebRTC in TypeScript: silence in Opus in, packets and events out.
import { MediaStreamTrack, RTCPeerConnection, RtpHeader, RtpPacket } from "werift";
import { call } from "./caller.mjs";

const pc = new RTCPeerConnection();
const track = new MediaStreamTrack({ kind: "audio" });
pc.addTransceiver(track, { direction: "sendrecv" });
let packets = 0;
pc.onTrack.subscribe((theirs) => theirs.onReceiveRtp.subscribe(() => packets++));
let number = 0;
const speaking = setInterval(() => {
  const header = new RtpHeader({ sequenceNumber: number & 0xffff, timestamp: number * 960, payloadType: 96 });
  track.writeRtp(new RtpPacket(header, Buffer.from([0xf8, 0xff, 0xfe])));
  number++;
}, 20);
await call(pc, (answer) => ({ type: "answer", sdp: answer }), () => packets > 5);
clearInterval(speaking);
console.log(JSON.stringify({ packets }));
process.exit(0);
