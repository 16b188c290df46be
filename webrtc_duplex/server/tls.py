"""HTTPS: browsers give the microphone to pages of this machine, and to pages that came over TLS."""

import datetime
import ipaddress
import socket
import ssl
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from webrtc_duplex.errors import RequestError
from webrtc_duplex.settings import ServerSettings

DEVELOPMENT_DAYS = 7


def make_tls(settings: ServerSettings) -> ssl.SSLContext | None:
    """What the settings want; None: plain HTTP. Raises RequestError for files that are no certificate and its key."""
    if settings.tls_dev:
        return _development(settings.host)
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return _context(settings.tls_cert, settings.tls_key)


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        message = f"{certificate} and {key} are no certificate and its key: {error}"
        raise RequestError(message, param="tls_cert") from error
    return context


def _development(host: str) -> ssl.SSLContext:
    """A certificate that nobody vouches for: the browser warns once, and then gives the microphone."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _self_signed(key, names_of(host)).public_bytes(Encoding.PEM)
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "certificate.pem", Path(folder) / "key.pem"
        files[0].write_bytes(certificate)
        files[1].touch(0o600)
        files[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return _context(*files)


def names_of(host: str) -> list[x509.GeneralName]:
    """What a browser may call a server that listens on this address."""
    names = {"localhost", "127.0.0.1", "::1", socket.gethostname()}
    if host not in ("0.0.0.0", "::"):
        names.add(host)
    return [_name(name) for name in sorted(names)]


def _name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _self_signed(key: ec.EllipticCurvePrivateKey, names: list[x509.GeneralName]) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "webrtc-duplex development")])
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(hours=1))
    builder = builder.not_valid_after(now + datetime.timedelta(days=DEVELOPMENT_DAYS))
    return builder.add_extension(x509.SubjectAlternativeName(names), critical=False).sign(key, hashes.SHA256())
