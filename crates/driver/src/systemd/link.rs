//! The connection to systemd, made anew whenever it is lost. `daemon-reexec` closes it; the units live on.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use zbus::connection::Builder;
use zbus::{Connection, DynamicType, MessageStream, Type};

use super::error::{CallError, SystemdError};
use super::signals::Dispatcher;
use super::socket::PrivateSocket;

pub const MANAGER: &str = "org.freedesktop.systemd1.Manager";
pub const PROPERTIES: &str = "org.freedesktop.DBus.Properties";
pub const MANAGER_PATH: &str = "/org/freedesktop/systemd1";

/// Nobody checks it on this socket, but a message has one.
const DESTINATION: &str = "org.freedesktop.systemd1";

/// Signals that wait to be sorted. A burst of two hundred mounts makes some three thousand; while the queue is full no answer
/// is read.
const QUEUED_SIGNALS: NonZeroUsize = NonZeroUsize::new(8192).unwrap();

/// systemd answers in milliseconds; on a node that is out of breath, in seconds.
const ANSWERS_WITHIN: Duration = Duration::from_secs(25);

/// How long callers wait for a lost connection. systemd is away for some 100 ms while it re-executes itself.
const BACK_WITHIN: Duration = Duration::from_secs(10);

/// Pause between two attempts to connect: short at first, because re-execution is short.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

#[derive(Clone)]
pub struct Link {
    state: watch::Receiver<State>,
    socket: PathBuf,
}

/// A connection and its number: whoever saw one fail waits for the next.
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

impl Link {
    /// Connects, and keeps connecting, until nobody has a copy of this any more.
    pub fn start(runtime: &tokio::runtime::Handle, socket: PathBuf, dispatcher: Dispatcher) -> Self {
        let (sender, state) = watch::channel(State::Down { cause: None });
        runtime.spawn(keep_connected(socket.clone(), sender, dispatcher));
        Self { state, socket }
    }

    /// A connection newer than `after`.
    pub async fn live(&self, after: u64) -> Result<Live, SystemdError> {
        let mut state = self.state.clone();
        let is_new = |it: &State| matches!(it, State::Up(live) if live.number > after);
        let found = tokio::time::timeout(BACK_WITHIN, state.wait_for(is_new)).await;
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

    /// A call that may be repeated: it is, on the next connection, if this one is lost meanwhile.
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
                Err(CallError::Lost) => after = live.number,
                Err(CallError::Refused(cause)) => {
                    return Err(SystemdError::Refused { call, unit: unit.to_owned(), cause });
                }
            }
        }
    }

    /// One property of a unit. Asking for one of a unit that is not loaded loads it, so ask only for those that are listed.
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
                        .map_err(|it| SystemdError::OddAnswer { call: name, cause: it.into() });
                }
                Err(CallError::Lost) => after = live.number,
                Err(CallError::Refused(cause)) => {
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
    ) -> Result<Answer, CallError>
    where
        Body: Serialize + DynamicType,
        Answer: DeserializeOwned + Type,
    {
        let answer = self.connection.call_method(Some(DESTINATION), path, Some(interface), member, body).await;
        answer.map_err(CallError::new)?.body().deserialize().map_err(CallError::Refused)
    }
}

async fn keep_connected(socket: PathBuf, state: watch::Sender<State>, dispatcher: Dispatcher) {
    let mut number = 0;
    let mut pause = FIRST_PAUSE;
    while !state.is_closed() {
        match connect(&socket).await {
            Ok(connection) => {
                number += 1;
                pause = FIRST_PAUSE;
                // Listening comes before everything else, so that nothing is said unheard.
                let messages = MessageStream::from(&connection);
                // Told before anybody can use the connection: who asks over it misses nothing and need not look twice.
                dispatcher.connected(number);
                state.send_replace(State::Up(Live { connection, number }));
                tokio::select! {
                    () = dispatcher.run(messages) => tracing::info!("connection to systemd lost, connecting again"),
                    () = state.closed() => return,
                }
                state.send_replace(State::Down { cause: None });
            }
            Err(cause) => {
                tracing::debug!(?socket, error = %cause, "systemd not reached");
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
    Builder::socket(socket).p2p().max_queued(QUEUED_SIGNALS).method_timeout(ANSWERS_WITHIN).build().await
}
