//! The running server: a thread and a runtime of its own, so that blocking tests may use it as well as async ones. It ends when its
//! handle is dropped.

use std::net::TcpListener;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::JoinHandle;

use bytes::Bytes;
use s3s::dto::Checksum;
use s3s::service::S3ServiceBuilder;
use tokio::sync::oneshot;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

use crate::access::Accounts;
use crate::certificates::{CertificateAuthority, CertificateError};
use crate::config::{Config, Transport};
use crate::data::{Data, ObjectAttributes, StoredBucket, StoredObject};
use crate::faults::{Fault, Faults, InjectedFault};
use crate::front::HttpFrontend;
use crate::operation::{RecordedRequest, S3Operation};
use crate::operations::Operations;
use crate::sessions::Sessions;
use crate::store::{Account, Store, StoreError};

#[derive(Debug, thiserror::Error)]
pub enum S3ServerError {
    #[error("an S3 server needs at least one account")]
    NoAccount,
    #[error("failed to listen on port {port}")]
    Listen {
        port: u16,
        #[source]
        cause: std::io::Error,
    },
    #[error("failed to make certificates")]
    Certificates {
        #[source]
        cause: CertificateError,
    },
    #[error("failed to set TLS up")]
    Tls {
        #[source]
        cause: tokio_rustls::rustls::Error,
    },
    #[error("failed to start the server's thread")]
    Thread {
        #[source]
        cause: std::io::Error,
    },
}

/// A running server. Dropping it stops it.
pub struct S3Server {
    port: u16,
    account: Account,
    authority: Option<String>,
    data: Arc<RwLock<Data>>,
    faults: Arc<Faults>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl S3Server {
    /// For async callers; nothing in it blocks for long.
    #[expect(clippy::unused_async, reason = "async tests read better when every server is started the same way")]
    pub async fn start(config: Config) -> Result<Self, S3ServerError> {
        Self::start_blocking(config)
    }

    pub fn start_blocking(config: Config) -> Result<Self, S3ServerError> {
        // No `..`: a setting without a use does not compile.
        let Config { address, port, accounts, buckets, transport, copy, rename, tagging } = config;
        let account = accounts.first().cloned().ok_or(S3ServerError::NoAccount)?;
        let mut data = Data::default();
        for it in accounts {
            data.accounts.insert(it.access_key, it.secret_key);
        }
        for it in buckets {
            data.buckets.insert(it, StoredBucket::new(&account.access_key));
        }
        let data = Arc::new(RwLock::new(data));
        let faults = Arc::new(Faults::default());

        let mut builder = S3ServiceBuilder::new(Operations { data: Arc::clone(&data), copy, rename, tagging });
        builder.set_auth(Accounts(Arc::clone(&data)));
        builder.set_access(Accounts(Arc::clone(&data)));
        let (tls, authority) = match transport {
            Transport::Plain => (None, None),
            Transport::Tls => tls()?,
        };
        let front = HttpFrontend { service: builder.build(), faults: Arc::clone(&faults), tls };

        let listen = |cause| S3ServerError::Listen { port, cause };
        let listener = TcpListener::bind((address, port)).map_err(listen)?;
        listener.set_nonblocking(true).map_err(listen)?;
        let port = listener.local_addr().map_err(listen)?.port();

        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("s3-server".to_owned())
            .spawn(move || run(front, listener, stopped))
            .map_err(|cause| S3ServerError::Thread { cause })?;
        Ok(Self { port, account, authority, data, faults, stop: Some(stop), thread: Some(thread) })
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// From now on, matching requests meet this fault.
    pub fn inject(&self, fault: Fault) -> InjectedFault {
        self.faults.inject(fault)
    }

    /// Forgets every fault and lets frozen requests go on.
    pub fn release_faults(&self) {
        self.faults.release_all();
    }

    /// Every request since the start or the last `forget_requests`, in order of arrival.
    pub fn requests(&self) -> Vec<RecordedRequest> {
        self.faults.log()
    }

    /// How many of these requests asked for `operation`.
    pub fn count(&self, operation: S3Operation) -> usize {
        self.requests().iter().filter(|it| it.operation == operation).count()
    }

    pub fn forget_requests(&self) {
        self.faults.forget_log();
    }

    /// How many multipart uploads were begun and neither completed nor aborted.
    pub fn open_uploads(&self) -> usize {
        self.read().uploads.len()
    }

    /// The checksum that was sent with an object that came in one request: its header's name after `x-amz-checksum-`.
    pub fn checksum(&self, bucket: &str, key: &str) -> Option<&'static str> {
        let data = self.read();
        let checksum = &data.buckets.get(bucket)?.objects.get(key)?.checksum;
        match (&checksum.checksum_crc32c, &checksum.checksum_crc64nvme) {
            (Some(_), _) => Some("crc32c"),
            (_, Some(_)) => Some("crc64nvme"),
            _ => None,
        }
    }

    /// Where the maker of a bucket wanted it.
    pub fn location(&self, bucket: &str) -> Option<String> {
        self.read().buckets.get(bucket)?.location.clone()
    }

    /// Takes an account's key away; from now on its requests are answered with 403.
    pub fn remove_account(&self, access_key: &str) {
        self.write().accounts.remove(access_key);
    }

    /// Temporary keys of this server.
    pub fn sessions(&self) -> Sessions {
        Sessions(Arc::clone(&self.data))
    }

    fn read(&self) -> RwLockReadGuard<'_, Data> {
        self.data.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Data> {
        self.data.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store for S3Server {
    fn endpoint(&self) -> String {
        let scheme = if self.authority.is_some() { "https" } else { "http" };
        format!("{scheme}://127.0.0.1:{}", self.port)
    }

    fn region(&self) -> &'static str {
        "us-east-1"
    }

    fn account(&self) -> &Account {
        &self.account
    }

    fn authority_pem(&self) -> Option<&str> {
        self.authority.as_deref()
    }

    fn add_account(&self, account: &Account) -> Result<(), StoreError> {
        self.write().accounts.insert(account.access_key.clone(), account.secret_key.clone());
        Ok(())
    }

    fn create_bucket(&self, name: &str, owner: &Account) -> Result<(), StoreError> {
        self.write().buckets.insert(name.to_owned(), StoredBucket::new(&owner.access_key));
        Ok(())
    }

    fn put_object(&self, bucket: &str, key: &str, content: &[u8]) -> Result<(), StoreError> {
        let object =
            StoredObject::whole(Bytes::copy_from_slice(content), ObjectAttributes::default(), Checksum::default());
        let mut data = self.write();
        let bucket =
            data.buckets.get_mut(bucket).ok_or_else(|| StoreError::NoSuchBucket { bucket: bucket.to_owned() })?;
        bucket.objects.insert(key.to_owned(), object);
        Ok(())
    }

    fn object(&self, bucket: &str, key: &str) -> Option<Bytes> {
        self.read().buckets.get(bucket)?.objects.get(key).map(StoredObject::content)
    }

    fn buckets(&self) -> Vec<(String, String)> {
        self.read().buckets.iter().map(|(name, it)| (name.clone(), it.owner.clone())).collect()
    }

    fn keys(&self, bucket: &str) -> Vec<String> {
        self.read().buckets.get(bucket).map(|it| it.objects.keys().cloned().collect()).unwrap_or_default()
    }

    fn as_dyn(&self) -> &dyn Store {
        self
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        self.faults.release_all();
        if let Some(stop) = self.stop.take() {
            // An error means that the thread has ended by itself.
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn run(front: HttpFrontend, listener: TcpListener, stopped: oneshot::Receiver<()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("s3-worker")
        .enable_all()
        .build()
        .expect("a runtime for the S3 server");
    runtime.block_on(async move {
        let listener = tokio::net::TcpListener::from_std(listener).expect("a listener that is not blocking");
        tokio::select! {
            () = front.serve(listener) => {}
            _ = stopped => {}
        }
    });
    // Connections that are still open are dropped with their tasks.
    runtime.shutdown_background();
}

fn tls() -> Result<(Option<TlsAcceptor>, Option<String>), S3ServerError> {
    let certificates = |cause| S3ServerError::Certificates { cause };
    let authority = CertificateAuthority::new().map_err(certificates)?;
    let server = authority.server().map_err(certificates)?;
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|cause| S3ServerError::Tls { cause })?
        .with_no_client_auth()
        .with_single_cert(
            vec![CertificateDer::from(server.certificate_der)],
            PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(server.key_der)),
        )
        .map_err(|cause| S3ServerError::Tls { cause })?;
    Ok((Some(TlsAcceptor::from(Arc::new(config))), Some(authority.pem())))
}
