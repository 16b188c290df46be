// What every caller in Node does: offer, take the answer, wait for sound and for the first event, hang up.
const server = process.argv[2];

export async function call(pc, asAnswer, heard) {
  const channel = pc.createDataChannel("oai-events");
  const greeted = new Promise((resolve) => {
    const take = ({ data }) => JSON.parse(data).type === "session.created" && resolve();
    channel.onmessage = take;
  });
  await pc.setLocalDescription(await pc.createOffer());
  const response = await fetch(`${server}/v1/realtime/calls`, {
    method: "POST",
    headers: { "Content-Type": "application/sdp" },
    body: pc.localDescription.sdp,
  });
  if (response.status !== 201) throw new Error(await response.text());
  await pc.setRemoteDescription(asAnswer(await response.text()));
  await greeted;
  while (!heard()) await new Promise((resolve) => setTimeout(resolve, 50));
  const Authorization = `Bearer ${response.headers.get("X-Call-Secret")}`;
  const ended = await fetch(new URL(response.headers.get("Location"), server), { method: "DELETE", headers: { Authorization } });
  if (ended.status !== 200) throw new Error(await ended.text());
}
