//! `mount-s3`: serves one S3 bucket as a FUSE file system. This file only connects the command line with the engine.

mod alive;
mod background;
mod cli;
mod client;
mod connect;
mod engine;
mod front;
mod logging;
mod probe;
mod session;
mod state;

use std::error::Error;
use std::process::exit;

use alive::AliveError;
use background::BackgroundError;
use cli::{Arguments, Environment, Refusal};
use s3csi_mounter::alone::AloneError;

fn main() {
    // Not by returning: the S3 client library has threads that may wait for a server for minutes, and are not waited for.
    exit(match run() {
        Ok(()) => 0,
        Err(Ending::Explained(line)) => {
            eprintln!("mount-s3: {line}");
            1
        }
        Err(Ending::ExplainedByChild) => 1,
    });
}

/// An error is one line, for people and for supervisors that show the last line of the log.
enum Ending {
    Explained(String),
    ExplainedByChild,
}

fn run() -> Result<(), Ending> {
    let arguments = match Arguments::parse_from_command_line(std::env::args_os()) {
        Ok(arguments) => arguments,
        Err(Refusal::Asked(text)) => {
            print!("{text}");
            return Ok(());
        }
        Err(Refusal::Wrong(line)) => return Err(Ending::Explained(line)),
    };
    let environment = Environment::read().map_err(Ending::Explained)?;
    let serves = arguments.foreground || environment.is_background_child || environment.keeper.is_some();
    let has_keeper = environment.keeper.is_some() || cli::descriptor_of(&arguments.mount_point).is_some();
    let keeps_alive = arguments.keep_alive || environment.keeps_alive;
    if serves && keeps_alive && !has_keeper {
        return alive::run(&arguments, &environment).map_err(|error| match error {
            AliveError::Alone(AloneError::Explained) => Ending::ExplainedByChild,
            error => Ending::Explained(chain(&error)),
        });
    }
    if serves {
        return engine::run(&arguments, &environment).map_err(|error| Ending::Explained(chain(&error)));
    }
    match background::start() {
        Ok(line) => println!("{line}"),
        Err(BackgroundError::ChildFailed) => return Err(Ending::ExplainedByChild),
        Err(error) => return Err(Ending::Explained(chain(&error))),
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
