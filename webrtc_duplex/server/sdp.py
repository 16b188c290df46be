"""The offer made safe, the answer edited: pure text in, text out.

`safe_offer` writes a new offer out of what it understood of the caller's: one audio section, at most one data channel,
known codecs, usable candidates. Nothing is copied unread, so aiortc is never shown a line that could upset it.
`finish_answer` puts aiortc's answer back into the shape of the caller's own offer (RFC 3264: as many m-lines, in the
same order) and says in it what aiortc leaves out.
"""

import ipaddress
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

from webrtc_duplex.audio import SAMPLE_RATE
from webrtc_duplex.errors import RequestError

MAX_LINES = 2000
MAX_SECTIONS = 32
MAX_CANDIDATES = 16
"""So many remote candidates are tried; a browser with two networks and TURN sends about ten."""
MAX_CANDIDATE_LINES = 64
"""So many are looked at: every caller waits while an offer is read, and thousands would take a second."""

OPUS_FORMAT = f"minptime=10;useinbandfec=1;stereo=0;maxplaybackrate={SAMPLE_RATE}"
"""What we like to get: error correction (without this line Chrome sends none), mono, and no band above the model's."""

VOICE_CODECS = {("opus", 48_000), ("g722", 8_000), ("pcmu", 8_000), ("pcma", 8_000)}
STATIC_CODECS = {"0": "PCMU/8000", "8": "PCMA/8000", "9": "G722/8000", "13": "CN/8000"}
"""Payload types that need no rtpmap (RFC 3551); SIP phones often send none."""

HASH_BYTES = {"sha-256": 32, "sha-384": 48, "sha-512": 64}
"""Fingerprints aiortc can check."""

_LINE_END = re.compile(r"\r\n|\n|\r")
_MEDIA = re.compile(r"([a-z]+) ([0-9]{1,5})(?:/[0-9]+)? ([A-Za-z/]+)((?: [^ ]+)+)", re.ASCII)
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+\-.^_`{|}~]{1,64}", re.ASCII)
_ICE_TEXT = re.compile(r"[!-~]{1,256}", re.ASCII)
_RTPMAP = re.compile(r"([0-9]{1,3}) +([A-Za-z0-9.\-]+)/([0-9]{1,6})(?:/[0-9]+)?", re.ASCII)
_EXTMAP = re.compile(r"([0-9]{1,3})(?:/[a-z]+)? +(urn:[!-~]+|https?:[!-~]+)(?: .*)?", re.ASCII)
_METADATA_HOSTS = {ipaddress.ip_address("fd00:ec2::254"), ipaddress.ip_address("100.100.100.200")}


# ---- the grammar


@dataclass(frozen=True, slots=True)
class Attribute:
    """One `a=` line."""

    name: str
    value: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        name, colon, value = text.partition(":")
        return cls(name.strip(), value.strip() if colon else None)

    def __str__(self) -> str:
        return f"a={self.name}" if self.value is None else f"a={self.name}:{self.value}"


@dataclass(frozen=True, slots=True)
class Media:
    """One m-line and the lines under it."""

    kind: str
    port: int
    profile: str
    formats: tuple[str, ...]
    connection: str | None = None
    attributes: tuple[Attribute, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        match = _MEDIA.fullmatch(text.strip())
        if match is None:
            raise _invalid(f"cannot read the media line 'm={text[:80]}'")
        kind, port, profile, formats = match.groups()
        return cls(kind, int(port), profile, tuple(formats.split()))

    def values(self, name: str) -> tuple[str, ...]:
        """Values of all attributes of this name, in order."""
        return tuple(a.value for a in self.attributes if a.name == name and a.value is not None)

    def value(self, name: str) -> str | None:
        return next(iter(self.values(name)), None)

    def has(self, name: str) -> bool:
        return any(a.name == name for a in self.attributes)

    @property
    def rejected(self) -> bool:
        """Port 0 takes a section out, unless it lives on another section's port (RFC 8843)."""
        return self.port == 0 and not self.has("bundle-only")

    def __str__(self) -> str:
        lines = [f"m={self.kind} {self.port} {self.profile} {' '.join(self.formats)}"]
        if self.connection is not None:
            lines.append(f"c={self.connection}")
        return _text([*lines, *map(str, self.attributes)])


@dataclass(frozen=True, slots=True)
class Description:
    """A whole session description."""

    lines: tuple[str, ...]
    """Session lines that are no attributes: `v=`, `o=`, `s=`, `t=` and the like."""
    attributes: tuple[Attribute, ...]
    media: tuple[Media, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a description; raises RequestError `invalid_sdp` where it is none."""
        if not _is_unicode(text):
            raise _invalid("a session description is UTF-8 text")
        lines = [line for line in _LINE_END.split(text) if line.strip()]
        if len(lines) > MAX_LINES:
            raise _invalid(f"at most {MAX_LINES} lines are read, not {len(lines)}")
        if not lines or lines[0].strip() != "v=0":
            raise _invalid("a session description begins with 'v=0'")
        if any(len(line) < 2 or line[1] != "=" for line in lines):
            raise _invalid("every line of a session description has the form 'x=...'")
        starts = [i for i, line in enumerate(lines) if line.startswith("m=")]
        if len(starts) > MAX_SECTIONS:
            raise _invalid(f"at most {MAX_SECTIONS} media sections are read, not {len(starts)}")
        bounds = [*starts, len(lines)]
        head = lines[: bounds[0]]
        return cls(
            tuple(line for line in head if not line.startswith("a=")),
            tuple(_attributes(head)),
            tuple(_section(lines[start:end]) for start, end in pairwise(bounds)),
        )

    def value(self, name: str) -> str | None:
        return next((a.value for a in self.attributes if a.name == name), None)

    def has(self, name: str) -> bool:
        return any(a.name == name for a in self.attributes)

    def mids(self) -> tuple[str, ...]:
        """Each section's name; a section without one is named after its place."""
        mids = tuple(media.value("mid") or f"section{i}" for i, media in enumerate(self.media))
        if not all(map(_TOKEN.fullmatch, mids)):
            raise _invalid("every 'a=mid' is a token of at most 64 characters")
        if len(set(mids)) < len(mids):
            raise _invalid("two media sections have the same 'a=mid'")
        return mids

    def bundle_of(self, mid: str) -> tuple[str, ...]:
        """Names of the sections that share a transport with this one; empty if it has its own."""
        mids = self.mids()
        for attribute in self.attributes:
            semantics, _, members = (attribute.value or "").partition(" ")
            if attribute.name == "group" and semantics == "BUNDLE" and mid in members.split():
                return tuple(dict.fromkeys(member for member in members.split() if member in mids))
        return ()

    def __str__(self) -> str:
        return _text([*self.lines, *map(str, self.attributes)]) + "".join(map(str, self.media))


def _section(lines: list[str]) -> Media:
    media = Media.parse(lines[0][2:])
    connection = next((line[2:] for line in lines if line.startswith("c=")), None)
    return replace(media, connection=connection, attributes=tuple(_attributes(lines)))


def _attributes(lines: Iterable[str]) -> Iterator[Attribute]:
    return (Attribute.parse(line[2:]) for line in lines if line.startswith("a="))


def _text(lines: Iterable[str]) -> str:
    return "".join(f"{line}\r\n" for line in lines)


def _is_unicode(text: str) -> bool:
    """False for text with half a surrogate pair in it, as JSON can smuggle in: no answer could quote it."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _number(text: str, low: int, high: int) -> int | None:
    """The number, if it is plain digits and within the bounds."""
    if not re.fullmatch(r"[0-9]{1,10}", text, re.ASCII):
        return None
    number = int(text)
    return number if low <= number <= high else None


def _invalid(message: str) -> RequestError:
    return RequestError(message, code="invalid_sdp", param="sdp")


def _unusable(message: str, code: str) -> RequestError:
    return RequestError(message, status=422, code=code, param="sdp")


# ---- candidates


@dataclass(frozen=True, slots=True)
class Candidate:
    """One UDP address of the caller, as a number: the only kind aioice can use."""

    foundation: str
    priority: int
    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int
    kind: str

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read what follows `candidate:`; None if it is broken, TCP, RTCP's, a name, or an address not to be called.

        Names (mDNS) are left out as aioice would wait a second for each; such a peer's own checks reach us all the
        same and show its address. Link-local and metadata addresses are not called at a stranger's word.
        """
        fields = text.removeprefix("candidate:").split()
        if len(fields) < 8 or fields[6] != "typ" or not _TOKEN.fullmatch(fields[0].replace("/", "")):
            return None
        foundation, component, protocol, priority, host, port, _, kind, *_ = fields
        number, priority_number = _number(port, 1, 65_535), _number(priority, 0, 2**32 - 1)
        if component != "1" or protocol.lower() != "udp" or kind not in {"host", "srflx", "prflx", "relay"}:
            return None
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return None
        if number is None or priority_number is None or not _callable(address):
            return None
        return cls(foundation, priority_number, address, number, kind)

    def __str__(self) -> str:
        return f"{self.foundation} 1 udp {self.priority} {self.address} {self.port} typ {self.kind}"


def _callable(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    plain = mapped or address
    never = plain.is_link_local or plain.is_multicast or plain.is_unspecified or plain in _METADATA_HOSTS
    return not never and plain != ipaddress.ip_address("255.255.255.255")


# ---- what we take of an offer


@dataclass(frozen=True, slots=True)
class _Choice:
    """The sections we take, by index, and the bundle they share (with sections that we do not take)."""

    audio: int
    channel: int | None
    mids: tuple[str, ...]
    bundle: tuple[str, ...]

    def takes(self, index: int) -> bool:
        return index in (self.audio, self.channel)

    def carries(self, index: int) -> bool:
        """Whether the section is on the audio's transport, so that it can be answered without one of its own."""
        return self.mids[index] in self.bundle


@dataclass(frozen=True, slots=True)
class _Transport:
    """ICE and DTLS of one section."""

    ufrag: str
    password: str
    setup: str
    fingerprints: tuple[str, ...]
    candidates: tuple[Candidate, ...]

    def attributes(self) -> list[Attribute]:
        return [
            Attribute("ice-ufrag", self.ufrag),
            Attribute("ice-pwd", self.password),
            *(Attribute("fingerprint", fingerprint) for fingerprint in self.fingerprints),
            Attribute("setup", self.setup),
            *(Attribute("candidate", str(candidate)) for candidate in self.candidates),
        ]


def _choose(offer: Description) -> _Choice:
    """Take the first audio section that speaks to us and the first data channel; raises `no_audio` if there is none."""
    mids = offer.mids()
    audio = next((i for i, media in enumerate(offer.media) if _speaks(offer, media)), None)
    if audio is None:
        raise _unusable("the offer has no audio that is sent to us (sendrecv or sendonly)", "no_audio")
    channel = next((i for i, media in enumerate(offer.media) if _is_channel(offer, media)), None)
    return _Choice(audio, channel, mids, offer.bundle_of(mids[audio]))


def _speaks(offer: Description, media: Media) -> bool:
    return media.kind == "audio" and not media.rejected and _direction(offer, media) in {"sendrecv", "sendonly"}


def _is_channel(offer: Description, media: Media) -> bool:
    if media.kind != "application" or media.rejected or not media.profile.endswith("DTLS/SCTP"):
        return False
    try:
        _transport(offer, media)
    except RequestError:
        return False
    return True


def _direction(offer: Description, media: Media) -> str:
    for attribute in (*media.attributes, *offer.attributes):
        if attribute.name in {"sendrecv", "sendonly", "recvonly", "inactive"}:
            return attribute.name
    return "sendrecv"


def _transport(offer: Description, media: Media) -> _Transport:
    """Gather what may stand in the section, at session level, or in the section whose port it shares."""
    index = next(i for i, other in enumerate(offer.media) if other is media)
    mids = offer.mids()
    shared = [offer.media[mids.index(mid)] for mid in offer.bundle_of(mids[index])]
    session = Media("session", 0, "", (), None, offer.attributes)
    places = [media, session, *shared]
    ufrag, password = _first(places, "ice-ufrag"), _first(places, "ice-pwd")
    if not (ufrag and password and _ICE_TEXT.fullmatch(ufrag) and _ICE_TEXT.fullmatch(password)):
        raise _unusable("the offer has no ICE credentials (a=ice-ufrag, a=ice-pwd)", "ice_required")
    lines = [line for place in [media, *shared] for line in place.values("candidate")]
    candidates = [candidate for line in lines[:MAX_CANDIDATE_LINES] if (candidate := Candidate.parse(line))]
    return _Transport(
        ufrag,
        password,
        _answerable_setup(_first(places, "setup")),
        _fingerprints(places),
        tuple(dict.fromkeys(candidates))[:MAX_CANDIDATES],
    )


def _first(places: Iterable[Media], name: str) -> str | None:
    return next((value for place in places for value in place.values(name)), None)


def _answerable_setup(setup: str | None) -> str:
    """`actpass` leaves the choice to us, and we choose to be the DTLS server.

    A peer with an RSA certificate (FreeSWITCH, GStreamer, baresip) fails against aiortc as the client. Told that the
    offer is `active`, aiortc answers `passive`, which is a right answer to `actpass` too.
    """
    match (setup or "actpass").lower():
        case "actpass" | "active":
            return "active"
        case "passive":
            return "passive"
    raise _unusable(f"a=setup is actpass, active or passive, not '{setup}'", "dtls_required")


def _fingerprints(places: Iterable[Media]) -> tuple[str, ...]:
    """Those of the nearest place that has any, if they are of a hash we know."""
    nearest = next((place.values("fingerprint") for place in places if place.values("fingerprint")), ())
    known = tuple(line for value in nearest if (line := _known_fingerprint(value)))
    if not known:
        raise _unusable("the offer has no certificate fingerprint (a=fingerprint:sha-256 ...)", "dtls_required")
    return known


def _known_fingerprint(value: str) -> str | None:
    name, _, digest = value.partition(" ")
    name, digest = name.lower(), digest.strip().upper()
    size = HASH_BYTES.get(name)
    if size is None or not re.fullmatch(r"[0-9A-F]{2}(:[0-9A-F]{2})*", digest, re.ASCII):
        return None
    return f"{name} {digest}" if len(digest) == 3 * size - 1 else None


@dataclass(frozen=True, slots=True)
class _Codec:
    payload_type: str
    name: str
    clock_rate: int

    @property
    def is_voice(self) -> bool:
        return (self.name.lower(), self.clock_rate) in VOICE_CODECS

    @property
    def is_comfort_noise(self) -> bool:
        return (self.name.lower(), self.clock_rate) == ("cn", 8_000)

    @property
    def is_known(self) -> bool:
        return self.is_voice or self.is_comfort_noise or self.name.lower() == "telephone-event"

    @property
    def rtpmap(self) -> str:
        channels = "/2" if self.name.lower() == "opus" else ""
        return f"{self.payload_type} {self.name}/{self.clock_rate}{channels}"


def _codecs(media: Media) -> list[_Codec]:
    """The codecs we know, in the caller's order, but the voice before all else: aiortc sends with the first.

    Comfort noise stays beside the codecs of telephones only: Opus makes its own, on another RTP clock.
    """
    maps = dict(STATIC_CODECS)
    for value in media.values("rtpmap"):
        if match := _RTPMAP.fullmatch(value):
            maps.setdefault(match[1], f"{match[2]}/{match[3]}")
    offered = [_codec(payload_type, maps.get(payload_type)) for payload_type in dict.fromkeys(media.formats)]
    known = [codec for codec in offered if codec is not None and codec.is_known]
    voice = next((codec for codec in known if codec.is_voice), None)
    if voice is None:
        raise _unusable("no common codec: opus, G722, PCMU or PCMA is wanted", "no_common_codec")
    kept = [codec for codec in known if voice.clock_rate == codec.clock_rate or not codec.is_comfort_noise]
    return sorted(kept, key=lambda codec: not codec.is_voice)


def _codec(payload_type: str, rtpmap: str | None) -> _Codec | None:
    number = _number(payload_type, 0, 127)
    if rtpmap is None or number is None or (number < 96 and payload_type not in STATIC_CODECS):
        return None
    name, _, rate = rtpmap.partition("/")
    return _Codec(payload_type, name, int(rate))


def _extensions(media: Media) -> list[Attribute]:
    """Header extensions with a number of their own (RFC 8285: 1-14 in the short form)."""
    found: dict[int, Attribute] = {}
    for value in media.values("extmap"):
        if (match := _EXTMAP.fullmatch(value)) and (number := _number(match[1], 1, 14)):
            found.setdefault(number, Attribute("extmap", f"{number} {match[2]}"))
    return list(found.values())


# ---- the offer made safe


def safe_offer(text: str) -> str:
    """Return an offer that aiortc can take, of the same meaning as the caller's; an answer to an offer of ours, too.

    Raises RequestError: 400 `invalid_sdp`; 422 `no_audio`, `no_common_codec`, `ice_required`, `dtls_required`,
    `rtcp_mux_required`.
    """
    offer = Description.parse(text)
    choice = _choose(offer)
    media = [_safe_audio(offer, choice)]
    if choice.channel is not None:
        media.insert(0 if choice.channel < choice.audio else 1, _safe_channel(offer, choice.channel, choice.mids))
    kept = {section.value("mid") for section in media}
    shared = [mid for mid in choice.bundle if mid in kept]
    attributes = [Attribute("group", " ".join(["BUNDLE", *shared]))] if shared else []
    if offer.has("ice-lite"):
        attributes.append(Attribute("ice-lite"))
    return str(Description(("v=0", "o=- 0 0 IN IP4 127.0.0.1", "s=-", "t=0 0"), tuple(attributes), tuple(media)))


def _safe_audio(offer: Description, choice: _Choice) -> Media:
    media = offer.media[choice.audio]
    codecs = _codecs(media)
    transport = _transport(offer, media)
    if not (media.has("rtcp-mux") or media.has("rtcp-mux-only")):
        raise _unusable("RTP and RTCP on one port are wanted (a=rtcp-mux)", "rtcp_mux_required")
    attributes = [
        Attribute(_direction(offer, media)),
        Attribute("mid", choice.mids[choice.audio]),
        Attribute("rtcp-mux"),
        *_extensions(media),
        *(Attribute("rtpmap", codec.rtpmap) for codec in codecs),
        *transport.attributes(),
    ]
    formats = tuple(codec.payload_type for codec in codecs)
    return Media("audio", 9, "UDP/TLS/RTP/SAVPF", formats, "IN IP4 0.0.0.0", tuple(attributes))


def _safe_channel(offer: Description, index: int, mids: tuple[str, ...]) -> Media:
    media = offer.media[index]
    shared = [Attribute("mid", mids[index]), *_transport(offer, media).attributes(), _message_size(media)]
    if media.profile == "DTLS/SCTP":  # as browsers wrote it before 2018: the port is the format
        port = _number(media.formats[0], 1, 65_535) or 5000
        attributes = [*shared, Attribute("sctpmap", f"{port} webrtc-datachannel 1024")]
        return Media("application", 9, media.profile, (str(port),), "IN IP4 0.0.0.0", tuple(attributes))
    port = _number(media.value("sctp-port") or "", 1, 65_535) or 5000
    attributes = [*shared, Attribute("sctp-port", str(port))]
    return Media("application", 9, "UDP/DTLS/SCTP", ("webrtc-datachannel",), "IN IP4 0.0.0.0", tuple(attributes))


def _message_size(media: Media) -> Attribute:
    """The largest message the caller takes; RFC 8841: 64 KiB if unsaid, 0 is any size."""
    size = _number(media.value("max-message-size") or "65536", 0, 2**31) or 262_144
    return Attribute("max-message-size", str(size))


# ---- the answer edited


def finish_answer(answer: str, offer: str) -> str:
    """Return aiortc's answer to `safe_offer(offer)` as an answer to `offer` itself.

    Sections we did not take are put back: inactive where they share the audio's transport, else port 0. An answer that
    is finished already comes back unchanged.
    """
    offered, answered = Description.parse(offer), Description.parse(answer)
    choice = _choose(offered)
    if len(answered.media) == len(offered.media):
        taken = {i: answered.media[i] for i in range(len(offered.media)) if choice.takes(i)}
    else:
        order = sorted(i for i in (choice.audio, choice.channel) if i is not None)
        taken = dict(zip(order, answered.media, strict=True))
    taken = {i: _finish(section, offered.media[i]) for i, section in taken.items()}
    media = tuple(
        taken[i] if i in taken else _decline(section, taken[choice.audio], choice.carries(i))
        for i, section in enumerate(offered.media)
    )
    group = _answered_group(choice, media)
    others = (a for a in answered.attributes if a.name != "group")
    return str(Description(answered.lines, (*group, *others), media))


def finish_offer(offer: str) -> str:
    """Return an offer of aiortc's as we send it: finished as an answer is."""
    description = Description.parse(offer)
    return str(replace(description, media=tuple(_finish(section, section) for section in description.media)))


def _finish(section: Media, offered: Media) -> Media:
    """Say what aiortc leaves out, and leave out what it says too much."""
    kept = [a for a in section.attributes if not _is_superfluous(a, offered)]
    edited: list[Attribute] = []
    for attribute in kept:
        edited.append(attribute)
        if attribute.name == "rtpmap" and (format_line := _format(attribute.value or "")):
            edited.append(format_line)
    edited.append(Attribute("ice-options", "trickle"))
    if section.kind == "audio":
        edited.append(Attribute("ptime", "20"))
    return replace(section, profile=offered.profile, attributes=tuple(edited))


def _is_superfluous(attribute: Attribute, offered: Media) -> bool:
    match attribute.name:
        case "fingerprint":  # one is enough, and Janus warns of each other
            return not (attribute.value or "").startswith("sha-256 ")
        case "mid":
            return not offered.has("mid")
    return attribute.name in {"fmtp", "ice-options", "ptime"}


def _format(rtpmap: str) -> Attribute | None:
    payload_type, _, codec = rtpmap.partition(" ")
    match codec.lower().partition("/")[0]:
        case "opus":
            return Attribute("fmtp", f"{payload_type} {OPUS_FORMAT}")
        case "telephone-event":
            return Attribute("fmtp", f"{payload_type} 0-15")
    return None


def _decline(offered: Media, audio: Media, on_audio_transport: bool) -> Media:
    """Answer a section we do not take. Inactive rather than rejected where we can: clients that address their
    transceivers by place (Pipecat's) go on working."""
    mid = [Attribute("mid", value) for value in offered.values("mid")]
    if offered.rejected or not on_audio_transport or offered.kind not in {"audio", "video"}:
        attributes = (Attribute("inactive"), *mid)
        return Media(offered.kind, 0, offered.profile, offered.formats, "IN IP4 0.0.0.0", attributes)
    formats = [a for a in offered.attributes if a.name in {"rtpmap", "fmtp"}]
    transport = [a for a in audio.attributes if a.name in {"ice-ufrag", "ice-pwd", "fingerprint", "setup"}]
    attributes = (Attribute("inactive"), *mid, Attribute("rtcp-mux"), *formats, *transport)
    return Media(offered.kind, 9, offered.profile, offered.formats, "IN IP4 0.0.0.0", attributes)


def _answered_group(choice: _Choice, media: tuple[Media, ...]) -> tuple[Attribute, ...]:
    """The bundle, the sections we take first: theirs is the transport (RFC 8843, 7.3.3)."""
    alive = [mid for mid in choice.bundle if media[choice.mids.index(mid)].port != 0]
    if not alive:
        return ()
    ordered = sorted(alive, key=lambda mid: not choice.takes(choice.mids.index(mid)))
    return (Attribute("group", " ".join(["BUNDLE", *ordered])),)


# ---- what trickles in later


@dataclass(frozen=True, slots=True)
class Fragment:
    """What a client says of its ICE after the offer (RFC 8840)."""

    ufrag: str | None
    candidates: tuple[tuple[str | None, str], ...]
    """Each with the name of its section."""


def parse_fragment(text: str) -> Fragment:
    """Read the body of a PATCH. Raises RequestError `invalid_sdp`."""
    lines = [line.strip() for line in _LINE_END.split(text) if line.strip()]
    if not lines or any(line[1:2] != "=" for line in lines):
        raise _invalid("a fragment is lines of the form 'x=...'")
    ufrag: str | None = None
    mid: str | None = None
    candidates: list[tuple[str | None, str]] = []
    for attribute in _attributes(lines):
        match attribute.name:
            case "ice-ufrag":
                ufrag = attribute.value
            case "mid":
                mid = attribute.value
            case "candidate":
                candidates.append((mid, attribute.value or ""))
    return Fragment(ufrag, tuple(candidates))


def ufrag_of(offer: str) -> str | None:
    """The ICE user name of a safe offer."""
    return next((value for media in Description.parse(offer).media for value in media.values("ice-ufrag")), None)


def is_heard(offer: str) -> bool:
    """Whether who sent this safe offer wants to hear us: a WHIP client does not."""
    return any(media.kind == "audio" and media.has("sendrecv") for media in Description.parse(offer).media)
