//! `mount-s3`: serves one S3 bucket as a FUSE file system. This file only connects the command line with the engine.

mod background;
mod cli;
mod client;
mod connect;
mod engine;
mod front;
mod keep_alive;
mod logging;
mod pid_file;
mod probe;
mod session;
mod settings;
mod state;
mod trust;

use std::error::Error;
use std::process::exit;

use background::BackgroundError;
use cli::{Arguments, Environment, ErrorFormat, ParseExit};
use keep_alive::KeepAliveError;
use s3csi_core::FailureCode;
use s3csi_handoff::{EngineFailure, core_dumps};
use s3csi_supervisor::standalone::StandaloneError;

fn main() {
    core_dumps::forbid_core_dumps();
    // Not by returning: the S3 client library has threads that may wait for a server for minutes, and are not waited for.
    exit(match run() {
        Ok(()) => 0,
        Err(Exit::Failed(failure)) => {
            match cli::error_format() {
                ErrorFormat::Text => eprintln!("mount-s3: {}", failure.message),
                ErrorFormat::Json => eprintln!("{}", failure.to_line()),
            }
            1
        }
        Err(Exit::ExplainedByChild) => 1,
    });
}

/// An error is one line, for people or for the program that reads our stderr.
enum Exit {
    Failed(EngineFailure),
    ExplainedByChild,
}

impl Exit {
    fn failed(code: FailureCode, message: String) -> Self {
        Self::Failed(EngineFailure { code, message })
    }
}

fn run() -> Result<(), Exit> {
    let arguments = match Arguments::parse_from_command_line(std::env::args_os()) {
        Ok(arguments) => arguments,
        Err(ParseExit::Help(text)) => {
            print!("{text}");
            return Ok(());
        }
        Err(ParseExit::Invalid(line)) => return Err(Exit::failed(FailureCode::BadArguments, line)),
    };
    let environment = Environment::read().map_err(|line| Exit::failed(FailureCode::BadArguments, line))?;
    let serves = arguments.foreground || environment.is_background_child || environment.supervisor.is_some();
    let has_supervisor = environment.supervisor.is_some() || cli::descriptor_of(&arguments.mount_point).is_some();
    let keeps_alive = arguments.keep_alive || environment.keeps_alive;
    if serves && keeps_alive && !has_supervisor {
        return keep_alive::run(&arguments, &environment).map_err(|error| match error {
            KeepAliveError::Standalone(StandaloneError::Reported) => Exit::ExplainedByChild,
            error => Exit::failed(FailureCode::Other, chain(&error)),
        });
    }
    if serves {
        return engine::run(&arguments, &environment).map_err(|error| Exit::failed(error.code(), chain(&error)));
    }
    match background::start() {
        Ok(line) => println!("{line}"),
        Err(BackgroundError::ChildFailed) => return Err(Exit::ExplainedByChild),
        Err(error) => return Err(Exit::failed(FailureCode::Other, chain(&error))),
    }
    Ok(())
}

/// The error and all its causes. Libraries like to repeat a cause in their own words; one time is enough.
fn chain(error: &dyn Error) -> String {
    let mut line = String::new();
    let mut next = Some(error);
    while let Some(cause) = next {
        next = cause.source();
        let words = cause.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        if line.ends_with(&words) {
            continue;
        }
        if !line.is_empty() {
            line.push_str(": ");
        }
        line.push_str(&words);
    }
    line
}
