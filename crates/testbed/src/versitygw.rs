//! versitygw, an S3 server we did not write, as a process of a fixture. Its objects are plain files with attributes,
//! so tests read and write them behind its back.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use bytes::Bytes;
use md5::{Digest as _, Md5};
use rustix::fs::{XattrFlags, getxattr, setxattr};
use s3s::checksum::ChecksumHasher;
use s3s::crypto::{Checksum as _, Crc64Nvme};

use crate::environment::{MissingProgram, tool};
use crate::fixture::Fixture;
use crate::process::{Process, ProcessError, command};
use crate::wait::wait_until;
use s3csi_s3_server::certificates::{CertificateAuthority, CertificateError};
use s3csi_s3_server::store::{Account, Store, StoreError};
use s3csi_s3_server::{Transport, hex};

/// It is ready after 0.1 to 0.2 seconds on an idle machine.
const READY_DEADLINE: Duration = Duration::from_secs(20);

/// Another program may take the chosen port before versitygw does.
const ATTEMPTS: usize = 3;

/// Directories of versitygw's own in each bucket.
const OWN_DIRECTORY: &str = ".sgwtmp";

pub struct Versitygw {
    process: Process,
    /// How it was started.
    command: Command,
    program: PathBuf,
    data: PathBuf,
    port: u16,
    root: Account,
    authority: Option<String>,
}

/// Whether buckets may keep versions of their objects, for those who ask for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Versioning {
    Available,
    Unavailable,
}

#[derive(Debug, thiserror::Error)]
pub enum VersitygwError {
    #[error("versitygw is missing")]
    Missing {
        #[source]
        cause: MissingProgram,
    },
    #[error("failed to prepare {path:?} for versitygw")]
    Prepare {
        path: PathBuf,
        #[source]
        cause: std::io::Error,
    },
    #[error("failed to make certificates for versitygw")]
    Certificates {
        #[source]
        cause: CertificateError,
    },
    #[error("failed to run versitygw")]
    Run {
        #[source]
        cause: ProcessError,
    },
    #[error("versitygw was not ready after {READY_DEADLINE:?}: {output}")]
    NotReady { output: String },
}

impl Versitygw {
    pub fn start(fixture: &Fixture, transport: Transport) -> Result<Self, VersitygwError> {
        Self::start_with(fixture, transport, Versioning::Unavailable)
    }

    pub fn start_with(fixture: &Fixture, transport: Transport, versioning: Versioning) -> Result<Self, VersitygwError> {
        let program = tool("versitygw").map_err(|cause| VersitygwError::Missing { cause })?;
        let directory = |name: &str| {
            let path = fixture.path("versitygw").join(name);
            fs::create_dir_all(&path).map(|()| path.clone()).map_err(|cause| VersitygwError::Prepare { path, cause })
        };
        let data = directory("data")?;
        let accounts = directory("accounts")?;
        let (authority, certificate) = match transport {
            Transport::Plain => (None, None),
            Transport::Tls => certificates(&directory("tls")?)?,
        };
        let versions = match versioning {
            Versioning::Unavailable => None,
            Versioning::Available => Some(directory("versions")?),
        };
        let root = Account::named("root");
        for _ in 0..ATTEMPTS {
            let port = free_port().map_err(|cause| VersitygwError::Prepare { path: "127.0.0.1".into(), cause })?;
            let mut command = command(&program);
            // The posix back end changes its directory, so every path must be absolute; these are.
            command.arg("--port").arg(format!("127.0.0.1:{port}")).arg("--iam-dir").arg(&accounts);
            command.args(["--keep-alive", "--quiet", "--health", "/health"]);
            if let Some((certificate, key)) = &certificate {
                command.arg("--cert").arg(certificate).arg("--key").arg(key);
            }
            command.arg("posix");
            if let Some(versions) = &versions {
                command.arg("--versioning-dir").arg(versions);
            }
            command.arg(&data);
            command.env("ROOT_ACCESS_KEY", &root.access_key).env("ROOT_SECRET_KEY", &root.secret_key);
            let process = fixture.start("versitygw", &mut command).map_err(|cause| VersitygwError::Run { cause })?;
            let deadline = Instant::now() + READY_DEADLINE;
            let is_ready = || match transport {
                Transport::Plain => is_healthy(port),
                // Its health is only asked for in the clear; a listener is as good, since it opens after everything else.
                Transport::Tls => TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok(),
            };
            if wait_until(deadline, || is_ready() || !process.is_running()) && process.is_running() {
                return Ok(Self { process, command, program, data, port, root, authority });
            }
            if process.is_running() {
                return Err(VersitygwError::NotReady { output: process.to_string() });
            }
        }
        Err(VersitygwError::NotReady { output: format!("it ended {ATTEMPTS} times") })
    }

    /// Starts it again with the same port, accounts and objects, when its process has ended.
    pub fn start_again(&mut self, fixture: &Fixture) -> Result<(), VersitygwError> {
        self.process = fixture.start("versitygw", &mut self.command).map_err(|cause| VersitygwError::Run { cause })?;
        let is_ready = || TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_ok();
        if wait_until(Instant::now() + READY_DEADLINE, is_ready) {
            Ok(())
        } else {
            Err(VersitygwError::NotReady { output: self.process.to_string() })
        }
    }

    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Where the objects of a bucket lie, as plain files.
    pub fn bucket_directory(&self, name: &str) -> PathBuf {
        self.data.join(name)
    }

    fn administer(&self, arguments: &[&str]) -> Result<(), StoreError> {
        let mut command = command(&self.program);
        command.args(["admin", "--allow-insecure", "--endpoint-url", &self.endpoint()]).args(arguments);
        command.env("ADMIN_ACCESS_KEY", &self.root.access_key).env("ADMIN_SECRET_KEY", &self.root.secret_key);
        let name = format!("versitygw admin {}", arguments.first().unwrap_or(&""));
        let output = command.output().map_err(|cause| StoreError::Run { command: name.clone(), cause })?;
        if output.status.success() {
            return Ok(());
        }
        let text = [output.stdout, output.stderr].concat();
        Err(StoreError::Refused { command: name, output: String::from_utf8_lossy(&text).into_owned() })
    }
}

impl Store for Versitygw {
    fn endpoint(&self) -> String {
        let scheme = if self.authority.is_some() { "https" } else { "http" };
        format!("{scheme}://127.0.0.1:{}", self.port)
    }

    fn region(&self) -> &'static str {
        "us-east-1"
    }

    fn account(&self) -> &Account {
        &self.root
    }

    fn authority_pem(&self) -> Option<&str> {
        self.authority.as_deref()
    }

    fn add_account(&self, account: &Account) -> Result<(), StoreError> {
        let Account { access_key, secret_key } = account;
        // The plus is the right to make buckets.
        self.administer(&["create-user", "--access", access_key, "--secret", secret_key, "--role", "userplus"])
    }

    fn create_bucket(&self, name: &str, owner: &Account) -> Result<(), StoreError> {
        self.administer(&["create-bucket", "--owner", &owner.access_key, "--bucket", name])
    }

    fn put_object(&self, bucket: &str, key: &str, content: &[u8]) -> Result<(), StoreError> {
        let path = self.data.join(bucket).join(key);
        let failed = |cause| StoreError::Write { path: path.clone(), cause };
        if !self.data.join(bucket).is_dir() {
            return Err(StoreError::NoSuchBucket { bucket: bucket.to_owned() });
        }
        write_object(&path, content).map_err(failed)
    }

    fn object(&self, bucket: &str, key: &str) -> Option<Bytes> {
        fs::read(self.data.join(bucket).join(key)).ok().map(Bytes::from)
    }

    fn buckets(&self) -> Vec<(String, String)> {
        let mut buckets = Vec::new();
        for entry in fs::read_dir(&self.data).into_iter().flatten().flatten() {
            let mut list = vec![0; 4096];
            // What has none is no bucket but versitygw's own.
            let Ok(length) = getxattr(entry.path(), "user.acl", list.as_mut_slice()) else {
                continue;
            };
            let list: serde_json::Value = serde_json::from_slice(&list[..length]).unwrap_or_default();
            let owner = list["Owner"].as_str().unwrap_or_default().to_owned();
            buckets.push((entry.file_name().to_string_lossy().into_owned(), owner));
        }
        buckets.sort();
        buckets
    }

    fn keys(&self, bucket: &str) -> Vec<String> {
        let root = self.data.join(bucket);
        let mut keys = Vec::new();
        let mut waiting = vec![root.clone()];
        while let Some(directory) = waiting.pop() {
            for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
                let path = entry.path();
                if entry.file_name() == OWN_DIRECTORY {
                    continue;
                }
                if path.is_dir() {
                    waiting.push(path);
                } else if let Ok(key) = path.strip_prefix(&root) {
                    keys.push(key.to_string_lossy().into_owned());
                }
            }
        }
        keys.sort();
        keys
    }

    fn as_dyn(&self) -> &dyn Store {
        self
    }
}

/// Makes an object behind the server's back.
pub(crate) fn write_object(path: &Path, content: &[u8]) -> std::io::Result<()> {
    fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))?;
    fs::write(path, content)?;
    // Without the attributes a listing has no entity tag and an empty checksum algorithm. The engine's client library
    // refuses the whole listing because of the latter, and no object that came through the server is like that.
    let tag = hex(&Md5::digest(content));
    for (name, value) in [("user.etag", tag), ("user.checksums", checksum_attribute(content))] {
        setxattr(path, name, value.as_bytes(), XattrFlags::empty())?;
    }
    Ok(())
}

fn checksum_attribute(content: &[u8]) -> String {
    let mut hasher = ChecksumHasher { crc64nvme: Some(Crc64Nvme::new()), ..ChecksumHasher::default() };
    hasher.update(content);
    let checksum = hasher.finalize().checksum_crc64nvme;
    serde_json::json!({ "Algorithm": "CRC64NVME", "Type": "FULL_OBJECT", "CRC64NVME": checksum }).to_string()
}

type Certificates = (Option<String>, Option<(PathBuf, PathBuf)>);

fn certificates(directory: &Path) -> Result<Certificates, VersitygwError> {
    let failed = |cause| VersitygwError::Certificates { cause };
    let authority = CertificateAuthority::new().map_err(failed)?;
    let server = authority.server().map_err(failed)?;
    let write = |name: &str, text: &str| {
        let path = directory.join(name);
        fs::write(&path, text).map(|()| path.clone()).map_err(|cause| VersitygwError::Prepare { path, cause })
    };
    let certificate = write("server.crt", &server.certificate_pem)?;
    let key = write("server.key", &server.key_pem)?;
    Ok((Some(authority.pem()), Some((certificate, key))))
}

fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

fn is_healthy(port: u16) -> bool {
    let ask = || {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        stream.write_all(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")?;
        let mut answer = [0; 12];
        stream.read_exact(&mut answer)?;
        Ok::<_, std::io::Error>(answer.ends_with(b" 200"))
    };
    ask().unwrap_or(false)
}
