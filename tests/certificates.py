"""Certificates as real ones are, made in a moment."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from baton.identity.certificates import Certificates
from baton.identity.identity import Identity
from baton.identity.keys import Role

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Certificate:
    """Files in PEM."""

    certificate: Path
    key: Path


class Authority:
    """Own a root's key; `ca` is the root's certificate."""

    def __init__(self, folder: Path, name: str = "root") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self.ca = folder / f"{name}.crt"
        built = _builder(self._name, self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        self.ca.write_bytes(_pem(built.sign(self._key, hashes.SHA256())))

    def issue(self, name: str, host: str = "127.0.0.1") -> Certificate:
        """For a server at `host` (or a URI), or a client. One of the same name is replaced at
        once."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(name), self._name, key).add_extension(
            x509.SubjectAlternativeName(_hosts(host)), critical=False
        )
        made = Certificate(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        swap(made.certificate, _pem(builder.sign(self._key, hashes.SHA256())))
        swap(
            made.key,
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )
        return made


def certified(authority: Authority, role: Role) -> Identity:
    return Identity(role, tls=Certificates(Path(link_folder(authority, role)), role))


def link_folder(authority: Authority, role: str, name: str = "") -> str:
    """A role's folder of identities, as cert-manager mounts it."""
    made = authority.issue(f"{role}-{name or 'one'}", f"baton:{role}")
    folder = made.certificate.parent / (name or role)
    folder.mkdir(exist_ok=True)
    for file, source in (
        ("ca.crt", authority.ca),
        ("tls.crt", made.certificate),
        ("tls.key", made.key),
    ):
        swap(folder / file, source.read_bytes())
    return str(folder)


def swap(path: Path, content: bytes) -> None:
    """Put it there whole: who reads sees the old one or this one."""
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(content)
    new.rename(path)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _hosts(host: str) -> list[x509.GeneralName]:
    if host.startswith("baton:"):
        return [x509.UniformResourceIdentifier(host), x509.DNSName(host.replace(":", "-"))]
    try:
        return [x509.IPAddress(ipaddress.ip_address(host))]
    except ValueError:
        return [x509.DNSName(host)]


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
