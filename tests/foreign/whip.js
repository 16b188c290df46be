// @binbat/whip-whep publishing the microphone.
import { WHIPClient } from "@binbat/whip-whep/whip.js";

window.begin = async (server) => {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  window.pc = new RTCPeerConnection({ bundlePolicy: "max-bundle" });
  for (const track of stream.getTracks()) window.pc.addTransceiver(track, { direction: "sendonly" });
  window.whip = new WHIPClient();
  await window.whip.publish(window.pc, `${server}/whip`);
  return String(window.whip.resourceURL);
};
