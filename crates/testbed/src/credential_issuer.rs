//! A server on loopback that issues temporary keys by the documented protocols of EC2's metadata service, STS and the agent for
//! containers. The keys are real: the S3 server checks them.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use s3csi_s3_server::Sessions;
use s3csi_s3_server::store::{Account, SECRET_MARK};

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

/// A running issuer. Dropping it stops it.
pub struct CredentialIssuer {
    port: u16,
    state: Arc<Mutex<State>>,
    thread: Option<JoinHandle<()>>,
}

struct State {
    mode: IssuerMode,
    /// The token that STS and the agent accept.
    token: String,
    sessions: Sessions,
    account: Account,
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
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port on loopback");
        let port = listener.local_addr().expect("the address of a listener").port();
        let state = Arc::new(Mutex::new(State {
            mode: IssuerMode::Issue { lifetime },
            token: token.to_owned(),
            sessions,
            account: account.clone(),
            issued: 0,
            is_stopped: false,
        }));
        let shared = Arc::clone(&state);
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if locked(&shared).is_stopped {
                    return;
                }
                // A client that leaves early is its own problem.
                let _ = serve(&stream, &shared);
                let _ = stream.shutdown(Shutdown::Both);
            }
        });
        Self { port, state, thread: Some(thread) }
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
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

fn serve(stream: &TcpStream, state: &Mutex<State>) -> std::io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let (status, body) = locked(state).answer(&read(stream)?);
    let mut stream = stream;
    write!(stream, "HTTP/1.1 {status} x\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len())
}

fn read(stream: &TcpStream) -> std::io::Result<Request> {
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
            "GET /v1/credentials" if header("authorization") == Some(&self.token) => self.issue(Form::Json),
            "GET /v1/credentials" => (401, String::new()),
            "POST /" if self.is_valid_form(&request.body) => self.issue(Form::Xml),
            "POST /" => (400, error("InvalidIdentityToken", &format!("token {} is not valid", request.body))),
            _ => (404, String::new()),
        }
    }

    fn is_valid_form(&self, body: &str) -> bool {
        let is_part = |name: &str, value: &str| {
            let encoded: String = value
                .bytes()
                .map(|it| if it.is_ascii_alphanumeric() { char::from(it).to_string() } else { format!("%{it:02X}") })
                .collect();
            body.split('&').any(|it| it == format!("{name}={encoded}"))
        };
        body.starts_with("Action=AssumeRoleWithWebIdentity&Version=2011-06-15&")
            && is_part("RoleArn", ROLE)
            && is_part("WebIdentityToken", &self.token)
    }

    fn issue(&mut self, form: Form) -> (u16, String) {
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
        self.sessions.add(&self.account, &keys, &token, expires);
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
