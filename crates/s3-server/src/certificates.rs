//! A certificate authority of our own, made for each test: what a private S3 server's administrator has.

use std::sync::atomic::{AtomicU64, Ordering};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose};

/// A name that no resolver knows (RFC 2606): only a proxy that was told leads there.
pub const UNRESOLVABLE_HOST: &str = "store.invalid";

/// Signs server certificates for this machine's loopback. No client trusts it by default.
pub struct CertificateAuthority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// How many authorities this process has made.
static NUMBER: AtomicU64 = AtomicU64::new(0);

/// What a server needs to speak TLS.
pub struct ServerCertificate {
    pub certificate_pem: String,
    pub certificate_der: Vec<u8>,
    pub key_pem: String,
    pub key_der: Vec<u8>,
}

#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    #[error("failed to make a certificate authority")]
    Authority {
        #[source]
        cause: rcgen::Error,
    },
    #[error("failed to make a server certificate")]
    Server {
        #[source]
        cause: rcgen::Error,
    },
}

impl CertificateAuthority {
    pub fn new() -> Result<Self, CertificateError> {
        let failed = |cause| CertificateError::Authority { cause };
        let mut parameters = CertificateParams::new(Vec::new()).map_err(failed)?;
        // Clients find an issuer by its name, so two authorities must not have the same.
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("s3csi testbed authority {}-{number}", std::process::id());
        parameters.distinguished_name.push(DnType::CommonName, name);
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate().map_err(failed)?;
        let issuer = CertifiedIssuer::self_signed(parameters, key).map_err(failed)?;
        Ok(Self { issuer })
    }

    /// What a client must trust.
    pub fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// A certificate for `localhost`, `127.0.0.1` and [`UNRESOLVABLE_HOST`].
    pub fn server(&self) -> Result<ServerCertificate, CertificateError> {
        let failed = |cause| CertificateError::Server { cause };
        let names = ["localhost", "127.0.0.1", UNRESOLVABLE_HOST].map(str::to_owned);
        let mut parameters = CertificateParams::new(names).map_err(failed)?;
        parameters.distinguished_name.push(DnType::CommonName, "s3csi testbed server");
        let key = KeyPair::generate().map_err(failed)?;
        let certificate = parameters.signed_by(&key, &self.issuer).map_err(failed)?;
        Ok(ServerCertificate {
            certificate_pem: certificate.pem(),
            certificate_der: certificate.der().to_vec(),
            key_pem: key.serialize_pem(),
            key_der: key.serialize_der(),
        })
    }
}
