"""Credentials: one key for a run: a process that has it belongs to the run.

Both sides of a connection present the run's self-signed certificate and trust that one and nothing else (mutual TLS 1.3). Host
names are not checked: identity is possession of the run's key, on whatever machine.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
import stat
from pathlib import Path

from asyncflow.types import UserError


class Credentials:
    """Key and certificate of a run; `create` or `load` them."""

    def __init__(self, server: ssl.SSLContext, client: ssl.SSLContext) -> None:
        self.server_context = server
        self.client_context = client

    @classmethod
    def create(cls, path: Path) -> Credentials:
        """Make a new key and certificate and write both to `path` (PEM, mode 0600).

        Raises:
            UserError: there is a file already, or it cannot be written.
        """
        pem = b"".join(self_signed("asyncflow run"))
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise UserError(f"the credentials {path} cannot be written: {error.strerror}.") from error
        with open(fd, "wb") as file:
            file.write(pem)
        return cls.load(path)

    @classmethod
    def load(cls, path: Path) -> Credentials:
        """Read what `create` has written.

        Raises:
            UserError: the file is not there, holds no credentials, or others than its owner may open it.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"the credentials {path} cannot be read: {error.strerror}.") from error
        try:
            status = os.fstat(fd)
            if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise UserError(f"the credentials {path} may be open to others than you: make them yours alone (chmod 600).")
            # The file that was looked at, whatever the path means by now.
            opened = f"/proc/self/fd/{fd}"
            return cls(_context(ssl.PROTOCOL_TLS_SERVER, opened), _context(ssl.PROTOCOL_TLS_CLIENT, opened))
        except ssl.SSLError as error:
            raise UserError(f"the file {path} holds no credentials.") from error
        finally:
            os.close(fd)


def _context(protocol: int, pem: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(pem)
    context.load_verify_locations(pem)
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # every connection shows its certificate
    return context


def self_signed(name: str, *hosts: str) -> tuple[bytes, bytes]:
    """A key and its own certificate (PEM each), good for a year. `hosts`: names and addresses that it is for; with some it may be
    trusted as an authority."""
    # Here, because nothing else needs the package and a run without TLS does not load it.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def named(host: str) -> x509.GeneralName:
        try:
            return x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            return x509.DNSName(host)

    key = ec.generate_private_key(ec.SECP256R1())
    own_name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(own_name)
        .issuer_name(own_name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)  # clocks differ
        .not_valid_after(now + 365 * day)
        .add_extension(x509.BasicConstraints(ca=bool(hosts), path_length=0 if hosts else None), critical=True)
    )
    if hosts:
        certificate = certificate.add_extension(x509.SubjectAlternativeName(map(named, hosts)), critical=False)
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return secret, certificate.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
