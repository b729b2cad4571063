//! A server on loopback that issues temporary keys by the documented protocols of EC2's metadata service, STS and the agent for
//! containers. The keys are real: the S3 server checks them.

use std::io::{BufRead as _, BufReader, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use percent_encoding::percent_decode_str;
use s3csi_s3_server::Sessions;
use s3csi_s3_server::certificates::CertificateAuthority;
use s3csi_s3_server::store::{Account, SECRET_MARK};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio_rustls::rustls::{ServerConfig, ServerConnection, StreamOwned};

/// The role that the metadata service and STS know.
pub const ROLE: &str = "arn:aws:iam::000000000000:role/testbed";

const ROLE_NAME: &str = "testbed";

const METADATA_SESSION: &str = "metadata-session-NeverPrintThis";

/// What the issuer does with the next requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IssuerMode {
    Issue {
        lifetime: Duration,
    },
    /// Keys that have expired already.
    IssueExpired,
    Refuse,
    /// 500.
    Fail,
    /// Something that no protocol knows.
    Malformed,
}

/// Who may have which role, as the administrator of an STS configures it. The agent for containers has an association without a role.
#[derive(Clone, Debug)]
pub struct RoleTrust {
    /// Such as `system:serviceaccount:team:robot`.
    pub subject: String,
    pub role: Option<String>,
    /// The account that the keys act as.
    pub account: Account,
}

/// Says for whom a token was issued, if it is valid.
pub type VerifyToken = Box<dyn Fn(&str) -> Option<String> + Send>;

/// A running issuer. Dropping it stops it.
pub struct CredentialIssuer {
    port: u16,
    authority: Option<String>,
    state: Arc<Mutex<State>>,
    thread: Option<JoinHandle<()>>,
}

struct State {
    mode: IssuerMode,
    /// The token that STS and the agent accept.
    token: String,
    sessions: Sessions,
    account: Account,
    verify: VerifyToken,
    trusts: Vec<RoleTrust>,
    issued: u32,
    is_stopped: bool,
}

struct Request {
    line: String,
    /// Lower case names.
    head: Vec<(String, String)>,
    body: String,
}

impl CredentialIssuer {
    /// Issues keys that act as `account` to bearers of `token`.
    pub fn start(sessions: Sessions, account: &Account, token: &str, lifetime: Duration) -> Self {
        Self::listen(Ipv4Addr::LOCALHOST, sessions, account, token, lifetime, None)
    }

    /// The same over TLS, with a certificate authority of its own.
    pub fn start_with_tls(sessions: Sessions, account: &Account, token: &str, lifetime: Duration) -> Self {
        let authority = CertificateAuthority::new().expect("a certificate authority");
        Self::listen(Ipv4Addr::LOCALHOST, sessions, account, token, lifetime, Some(&authority))
    }

    /// The same where others than this machine's programs reach it.
    pub fn start_at(address: Ipv4Addr, sessions: Sessions, account: &Account, lifetime: Duration) -> Self {
        Self::listen(address, sessions, account, "no token is the driver's", lifetime, None)
    }

    fn listen(
        address: Ipv4Addr,
        sessions: Sessions,
        account: &Account,
        token: &str,
        lifetime: Duration,
        authority: Option<&CertificateAuthority>,
    ) -> Self {
        let listener = TcpListener::bind((address, 0)).expect("a port");
        let port = listener.local_addr().expect("the address of a listener").port();
        let state = Arc::new(Mutex::new(State {
            mode: IssuerMode::Issue { lifetime },
            token: token.to_owned(),
            sessions,
            account: account.clone(),
            verify: Box::new(|_| None),
            trusts: Vec::new(),
            issued: 0,
            is_stopped: false,
        }));
        let shared = Arc::clone(&state);
        let tls = authority.map(tls_config);
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if locked(&shared).is_stopped {
                    return;
                }
                // A client that leaves early is its own problem.
                let _ = answer(&stream, tls.as_ref(), &shared);
                let _ = stream.shutdown(Shutdown::Both);
            }
        });
        Self { port, authority: authority.map(CertificateAuthority::pem), state, thread: Some(thread) }
    }

    pub fn url(&self) -> String {
        let scheme = if self.authority.is_some() { "https" } else { "http" };
        format!("{scheme}://127.0.0.1:{}", self.port)
    }

    pub const fn port(&self) -> u16 {
        self.port
    }

    /// What clients of a TLS issuer must trust.
    pub fn authority_pem(&self) -> Option<&str> {
        self.authority.as_deref()
    }

    /// Tokens of workloads are checked by `verify`; their subjects get keys as `trusts` says.
    pub fn trust(&self, verify: VerifyToken, trusts: &[RoleTrust]) {
        let mut state = locked(&self.state);
        state.verify = verify;
        state.trusts = trusts.to_vec();
    }

    pub fn set_mode(&self, mode: IssuerMode) {
        locked(&self.state).mode = mode;
    }

    /// How many keys were issued.
    pub fn issued(&self) -> u32 {
        locked(&self.state).issued
    }
}

impl Drop for CredentialIssuer {
    fn drop(&mut self) {
        locked(&self.state).is_stopped = true;
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn locked(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

fn tls_config(authority: &CertificateAuthority) -> Arc<ServerConfig> {
    let server = authority.server().expect("a server certificate");
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(server.key_der));
    let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().expect("TLS").with_no_client_auth();
    let config = builder.with_single_cert(vec![CertificateDer::from(server.certificate_der)], key);
    Arc::new(config.expect("a certificate and its key"))
}

fn answer(stream: &TcpStream, tls: Option<&Arc<ServerConfig>>, state: &Mutex<State>) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    match tls {
        None => serve(stream, state),
        Some(config) => {
            let connection = ServerConnection::new(Arc::clone(config)).map_err(std::io::Error::other)?;
            let mut stream = StreamOwned::new(connection, stream);
            serve(&mut stream, state)?;
            stream.conn.send_close_notify();
            stream.flush()
        }
    }
}

fn serve(mut stream: impl Read + Write, state: &Mutex<State>) -> std::io::Result<()> {
    let (status, body) = {
        let request = read(&mut stream)?;
        locked(state).answer(&request)
    };
    write!(stream, "HTTP/1.1 {status} x\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len())?;
    stream.flush()
}

fn read(stream: impl Read) -> std::io::Result<Request> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut head = Vec::new();
    loop {
        let mut header = String::new();
        reader.read_line(&mut header)?;
        match header.trim_end().split_once(':') {
            None => break,
            Some((name, value)) => head.push((name.to_lowercase(), value.trim().to_owned())),
        }
    }
    let length = head.iter().find(|(name, _)| name == "content-length").and_then(|(_, value)| value.parse().ok());
    let mut body = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut body)?;
    let line = line.trim_end().trim_end_matches(" HTTP/1.1").to_owned();
    Ok(Request { line, head, body: String::from_utf8_lossy(&body).into_owned() })
}

impl State {
    fn answer(&mut self, request: &Request) -> (u16, String) {
        let header = |name: &str| request.head.iter().find(|(it, _)| it == name).map(|(_, value)| value.as_str());
        match request.line.as_str() {
            "PUT /latest/api/token" if header("x-aws-ec2-metadata-token-ttl-seconds").is_some() => {
                (200, METADATA_SESSION.to_owned())
            }
            "GET /latest/meta-data/iam/security-credentials/"
            | "GET /latest/meta-data/iam/security-credentials/testbed"
                if header("x-aws-ec2-metadata-token") != Some(METADATA_SESSION) =>
            {
                (401, String::new())
            }
            "GET /latest/meta-data/iam/security-credentials/" if self.mode == IssuerMode::Refuse => {
                (404, String::new())
            }
            "GET /latest/meta-data/iam/security-credentials/" => (200, ROLE_NAME.to_owned()),
            "GET /latest/meta-data/iam/security-credentials/testbed" => self.issue(Form::Json),
            "GET /v1/credentials" => match header("authorization").map(|it| self.account_of(it, None)) {
                Some(Ok(account)) => self.issue_for(&account, Form::Json),
                Some(Err(_)) | None => (401, String::new()),
            },
            "POST /" => self.assume_role(&request.body),
            _ => (404, String::new()),
        }
    }

    /// `AssumeRoleWithWebIdentity`.
    fn assume_role(&mut self, body: &str) -> (u16, String) {
        let part = |name: &str| {
            let mut parts = body.split('&').filter_map(|it| it.split_once('='));
            let (_, value) = parts.find(|(it, _)| *it == name)?;
            Some(percent_decode_str(value).decode_utf8_lossy().into_owned())
        };
        let invalid = || (400, error("InvalidIdentityToken", &format!("token {body} is not valid")));
        let known = body.starts_with("Action=AssumeRoleWithWebIdentity&Version=2011-06-15&");
        let has_session = part("RoleSessionName").is_some_and(|it| (2..=64).contains(&it.len()));
        let (Some(role), Some(token)) = (part("RoleArn"), part("WebIdentityToken").filter(|_| known && has_session))
        else {
            return invalid();
        };
        match self.account_of(&token, Some(&role)) {
            Ok(account) => self.issue_for(&account, Form::Xml),
            Err(InvalidToken::Unknown) => invalid(),
            Err(InvalidToken::NotTrusted) => {
                (403, error("AccessDenied", "Not authorized to perform sts:AssumeRoleWithWebIdentity"))
            }
        }
    }

    /// Whose keys the bearer of a token gets.
    fn account_of(&self, token: &str, role: Option<&str>) -> Result<Account, InvalidToken> {
        if token == self.token {
            let is_known = role.is_none_or(|it| it == ROLE);
            return if is_known { Ok(self.account.clone()) } else { Err(InvalidToken::NotTrusted) };
        }
        let subject = (self.verify)(token).ok_or(InvalidToken::Unknown)?;
        let trust = self.trusts.iter().find(|it| it.subject == subject && it.role.as_deref() == role);
        trust.map(|it| it.account.clone()).ok_or(InvalidToken::NotTrusted)
    }

    fn issue(&mut self, form: Form) -> (u16, String) {
        let account = self.account.clone();
        self.issue_for(&account, form)
    }

    fn issue_for(&mut self, account: &Account, form: Form) -> (u16, String) {
        let now = SystemTime::now();
        let expires = match self.mode {
            IssuerMode::Issue { lifetime } => now + lifetime,
            IssuerMode::IssueExpired => now - Duration::from_mins(1),
            IssuerMode::Refuse => return (403, error("AccessDenied", "the role is not yours")),
            IssuerMode::Fail => return (500, String::new()),
            IssuerMode::Malformed => return (200, "<html>It works!</html>".to_owned()),
        };
        self.issued += 1;
        let keys = Account::named(&format!("session-{}", self.issued));
        let token = format!("session-token-{}-{SECRET_MARK}+/=", self.issued);
        self.sessions.add(account, &keys, &token, expires);
        let (id, key, time) = (&keys.access_key, &keys.secret_key, timestamp(expires));
        let body = match form {
            Form::Json => format!(
                r#"{{"Code":"Success","AccessKeyId":"{id}","SecretAccessKey":"{key}","Token":"{token}","Expiration":"{time}"}}"#
            ),
            Form::Xml => format!(
                "<AssumeRoleWithWebIdentityResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\">\
                 <AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{id}</AccessKeyId>\
                 <SecretAccessKey>{key}</SecretAccessKey><SessionToken>{token}</SessionToken>\
                 <Expiration>{time}</Expiration></Credentials></AssumeRoleWithWebIdentityResult>\
                 </AssumeRoleWithWebIdentityResponse>"
            ),
        };
        (200, body)
    }
}

/// Why a token gets no keys.
enum InvalidToken {
    Unknown,
    NotTrusted,
}

#[derive(Clone, Copy)]
enum Form {
    Json,
    Xml,
}

fn error(code: &str, message: &str) -> String {
    format!("<ErrorResponse><Error><Code>{code}</Code><Message>{message}</Message></Error></ErrorResponse>")
}

/// RFC 3339 in UTC; `date` knows the calendar.
fn timestamp(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let output = std::process::Command::new("date").args(["-u", "-d", &format!("@{seconds}"), "+%FT%TZ"]).output();
    String::from_utf8_lossy(&output.expect("date runs").stdout).trim().to_owned()
}
