//! Sends log events to the local syslog socket, one datagram each (RFC 3164).

use std::fmt::{Debug, Write};
use std::os::unix::net::UnixDatagram;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

const SOCKET: &str = "/dev/log";
/// Facility "user", times eight as the protocol wants it.
const FACILITY: u8 = 1 << 3;

pub struct Syslog {
    socket: UnixDatagram,
    process: u32,
}

impl Syslog {
    /// `None` where there is no syslog, as in most containers: it is only a default.
    pub fn connect() -> Option<Self> {
        let socket = UnixDatagram::unbound().ok()?;
        socket.connect(SOCKET).ok()?;
        // A full syslog must not stop the file system.
        socket.set_nonblocking(true).ok()?;
        Some(Self { socket, process: std::process::id() })
    }
}

impl<S: Subscriber> Layer<S> for Syslog {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        let level = *event.metadata().level();
        let line = format!(
            "<{}>mount-s3[{}]: [{level}] {}{}",
            FACILITY | severity(level),
            self.process,
            event.metadata().target(),
            text.0
        );
        // There is no better place to report that the log cannot be written.
        let _ = self.socket.send(line.as_bytes());
    }
}

fn severity(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        Level::DEBUG | Level::TRACE => 7,
    }
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Writing to a string cannot fail.
        let _ = match field.name() {
            "message" => write!(self.0, ": {value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        };
    }
}
