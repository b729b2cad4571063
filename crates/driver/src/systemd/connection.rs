//! The connection to systemd, re-established whenever it is lost. `daemon-reexec` closes it; units keep running.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use zbus::connection::Builder;
use zbus::{Connection, DynamicType, MessageStream, Type};

use super::error::{BusCallError, SystemdError};
use super::signals::Dispatcher;
use super::socket::PrivateSocket;

pub const MANAGER: &str = "org.freedesktop.systemd1.Manager";
pub const PROPERTIES: &str = "org.freedesktop.DBus.Properties";
pub const MANAGER_PATH: &str = "/org/freedesktop/systemd1";

/// Not checked on this socket, but required in a message.
const DESTINATION: &str = "org.freedesktop.systemd1";

/// Queued signals. Two hundred simultaneous mounts produce about three thousand; while the queue is full no reply is read.
const QUEUED_SIGNALS: NonZeroUsize = NonZeroUsize::new(8192).unwrap();

/// systemd replies in milliseconds; on an overloaded node, in seconds.
const REPLY_TIMEOUT: Duration = Duration::from_secs(25);

/// How long calls wait for a new connection. A re-execution of systemd takes about 100 ms.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The first version whose transient units may write to a file (`StandardOutputFile`), without which a unit that is started again
/// has no output to open.
const KEEPS_DESCRIPTORS: u32 = 236;

/// The first version that does not poll the descriptors it keeps if the service asks for it (`FDPOLL=0`).
const KEEPS_THEM_UNPOLLED: u32 = 246;

/// Pause between two attempts to connect; short at first, because a re-execution is short.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

#[derive(Clone)]
pub struct ManagerConnection {
    state: watch::Receiver<State>,
    socket: PathBuf,
}

/// A connection and its number: a caller whose connection failed waits for a higher number.
#[derive(Clone)]
pub struct Live {
    connection: Connection,
    number: u64,
}

#[derive(Clone)]
enum State {
    Up(Live),
    Down { cause: Option<zbus::Error> },
}

impl ManagerConnection {
    /// Connects and reconnects until all clones are dropped.
    pub fn start(runtime: &tokio::runtime::Handle, socket: PathBuf, dispatcher: Dispatcher) -> Self {
        let (sender, state) = watch::channel(State::Down { cause: None });
        runtime.spawn(keep_connected(socket.clone(), sender, dispatcher));
        Self { state, socket }
    }

    /// A connection newer than `after`.
    pub async fn live(&self, after: u64) -> Result<Live, SystemdError> {
        let mut state = self.state.clone();
        let is_new = |it: &State| matches!(it, State::Up(live) if live.number > after);
        let found = tokio::time::timeout(RECONNECT_TIMEOUT, state.wait_for(is_new)).await;
        if let Ok(Ok(up)) = found
            && let State::Up(live) = &*up
        {
            return Ok(live.clone());
        }
        let cause = match &*self.state.borrow() {
            State::Down { cause } => cause.clone(),
            State::Up(_) => None,
        };
        Err(SystemdError::Unreachable { socket: self.socket.clone(), cause })
    }

    /// An idempotent call: repeated on the next connection if this one is lost.
    pub async fn call<Body, Answer>(&self, call: &'static str, unit: &str, body: &Body) -> Result<Answer, SystemdError>
    where
        Body: Serialize + DynamicType,
        Answer: DeserializeOwned + Type,
    {
        let mut after = 0;
        loop {
            let live = self.live(after).await?;
            match live.call(MANAGER_PATH, MANAGER, call, body).await {
                Ok(answer) => return Ok(answer),
                Err(BusCallError::Lost) => after = live.number,
                Err(BusCallError::Refused(cause)) => {
                    return Err(SystemdError::Refused { call, unit: unit.to_owned(), cause });
                }
            }
        }
    }

    /// A property of a unit. Reading it loads a unit that is not loaded, so use it for listed units only.
    pub async fn property<Answer>(
        &self,
        path: &str,
        interface: &str,
        name: &'static str,
    ) -> Result<Answer, SystemdError>
    where
        Answer: TryFrom<zbus::OwnedVariant>,
        Answer::Error: Into<zbus::Error>,
    {
        let mut after = 0;
        loop {
            let live = self.live(after).await?;
            match live.call::<_, zbus::OwnedVariant>(path, PROPERTIES, "Get", &(interface, name)).await {
                Ok(value) => {
                    return Answer::try_from(value)
                        .map_err(|it| SystemdError::InvalidAnswer { call: name, cause: it.into() });
                }
                Err(BusCallError::Lost) => after = live.number,
                Err(BusCallError::Refused(cause)) => {
                    return Err(SystemdError::Refused { call: "Get", unit: path.to_owned(), cause });
                }
            }
        }
    }
}

impl Live {
    pub const fn number(&self) -> u64 {
        self.number
    }

    pub async fn call<Body, Answer>(
        &self,
        path: &str,
        interface: &str,
        member: &str,
        body: &Body,
    ) -> Result<Answer, BusCallError>
    where
        Body: Serialize + DynamicType,
        Answer: DeserializeOwned + Type,
    {
        let answer = self.connection.call_method(Some(DESTINATION), path, Some(interface), member, body).await;
        answer.map_err(BusCallError::new)?.body().deserialize().map_err(BusCallError::Refused)
    }
}

/// Logs the version of systemd once, and what it cannot do.
async fn log_version(live: &Live, known: &mut Option<String>) {
    let answer = live.call::<_, zbus::OwnedVariant>(MANAGER_PATH, PROPERTIES, "Get", &(MANAGER, "Version")).await;
    let Some(version) = answer.ok().and_then(|it| String::try_from(it).ok()) else { return };
    if known.as_ref() == Some(&version) {
        return;
    }
    match missing_ability(&version) {
        None => tracing::info!(version, "connected to systemd"),
        Some(missing) => tracing::warn!(version, missing, "connected to an old version of systemd"),
    }
    *known = Some(version);
}

/// `version` is as systemd reports it, such as `252.39-1~deb12u1`. One that is not understood is taken for a recent one.
fn missing_ability(version: &str) -> Option<&'static str> {
    let number = version.trim_start_matches('v').split(|it: char| !it.is_ascii_digit()).next()?;
    match number.parse::<u32>().ok()? {
        ..KEEPS_DESCRIPTORS => Some("it cannot keep descriptors: mounts end with their units, or units are refused"),
        KEEPS_DESCRIPTORS..KEEPS_THEM_UNPOLLED => {
            Some("it polls the descriptors that it keeps: each request of a mount wakes systemd")
        }
        KEEPS_THEM_UNPOLLED.. => None,
    }
}

async fn keep_connected(socket: PathBuf, state: watch::Sender<State>, dispatcher: Dispatcher) {
    let mut known_version = None;
    let mut number = 0;
    let mut pause = FIRST_PAUSE;
    while !state.is_closed() {
        match connect(&socket).await {
            Ok(connection) => {
                number += 1;
                pause = FIRST_PAUSE;
                // Subscribed first, so that no signal is missed.
                let messages = MessageStream::from(&connection);
                // Announced before the connection can be used: calls over it miss no signal.
                dispatcher.connected(number);
                let live = Live { connection, number };
                state.send_replace(State::Up(live.clone()));
                let version = async {
                    log_version(&live, &mut known_version).await;
                    std::future::pending::<()>().await;
                };
                tokio::select! {
                    () = version => {}
                    () = dispatcher.run(messages) => tracing::info!("connection to systemd lost, reconnecting"),
                    () = state.closed() => return,
                }
                state.send_replace(State::Down { cause: None });
            }
            Err(cause) => {
                tracing::debug!(?socket, error = %cause, "failed to connect to systemd");
                state.send_replace(State::Down { cause: Some(cause) });
                tokio::select! {
                    () = tokio::time::sleep(pause) => pause = LONGEST_PAUSE.min(pause * 2),
                    () = state.closed() => return,
                }
            }
        }
    }
}

async fn connect(socket: &Path) -> zbus::Result<Connection> {
    let socket = PrivateSocket::connect(socket).await?;
    Builder::socket(socket).p2p().max_queued(QUEUED_SIGNALS).method_timeout(REPLY_TIMEOUT).build().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_versions_are_recognised() {
        for version in ["252.39-1~deb12u1", "257", "v246", "246.1", "unknown", ""] {
            assert_eq!(missing_ability(version), None, "{version}");
        }
        for (version, expected) in [("245.4-4ubuntu3.24", "polls"), ("239 (239-82.el8)", "polls"), ("219", "cannot")] {
            assert!(missing_ability(version).is_some_and(|it| it.contains(expected)), "{version}");
        }
    }
}
