//! Laws of everything that one process parses and another one wrote: no text makes a parser panic, nothing is half understood, and
//! what was written is what is read.

use proptest::prelude::*;
use s3csi_core::FailureCode;

use crate::receive::{parse, parse_without_descriptor};
use crate::{Answer, EngineFailure, MountRequest, SourceCommand, SourceName, StatusReport};

/// Any characters, also those that need escapes.
fn text() -> impl Strategy<Value = String> {
    prop_oneof!["[ -~]{0,24}", "\\PC{0,12}", prop::collection::vec(any::<char>(), 0..12).prop_map(String::from_iter)]
}

/// Pieces of messages in any order.
fn pieces() -> impl Strategy<Value = String> {
    let piece = prop::sample::select(vec![
        "{",
        "}",
        "[",
        "]",
        "\"",
        ":",
        ",",
        "\\",
        "null",
        "true",
        "-1",
        "1e999",
        "\"answer\"",
        "\"failed\"",
        "\"held\"",
        "\"exited\"",
        "\"code\"",
        "\"error\"",
        "\"stop\"",
        "\"bucketName\"",
        "\"args\"",
        "\"env\"",
        "\"resume\"",
        "\"request\"",
        "\"message\"",
        "engine ",
        " is serving; the previous one died (",
        "), pause ",
        " ms",
        "\n",
        "\\ud800",
        "é",
    ]);
    prop::collection::vec(piece, 0..24).prop_map(|it| it.concat())
}

fn code() -> impl Strategy<Value = FailureCode> {
    prop::sample::select(vec![
        FailureCode::UnknownKey,
        FailureCode::NoCredentials,
        FailureCode::Forbidden,
        FailureCode::NoSuchBucket,
        FailureCode::Unreachable,
        FailureCode::Certificate,
        FailureCode::InvalidResponse,
        FailureCode::BadArguments,
        FailureCode::Other,
    ])
}

prop_compose! {
    fn request()(
        (bucket_name, source) in (text(), prop::option::of(text())),
        (args, env) in (prop::collection::vec(text(), 0..4), prop::collection::vec(text(), 0..4)),
        (hold, resume, wait) in any::<(bool, bool, bool)>(),
    ) -> MountRequest {
        MountRequest { bucket_name, args, env, source, hold, resume, wait }
    }
}

fn answer() -> impl Strategy<Value = Answer> {
    prop_oneof![
        Just(Answer::Ready),
        Just(Answer::Prepared),
        Just(Answer::Released),
        (text(), any::<u64>()).prop_map(|(cause, stall_milliseconds)| Answer::Resumed { cause, stall_milliseconds }),
        (text(), any::<u64>()).prop_map(|(reason, stall_milliseconds)| Answer::Replaced { reason, stall_milliseconds }),
        prop::option::of(request()).prop_map(|request| Answer::Held { request }),
        (text(), prop::option::of(code())).prop_map(|(error, code)| Answer::Failed { error, code }),
        (any::<Option<i32>>(), any::<Option<i32>>(), text()).prop_map(|(code, signal, error)| Answer::Exited {
            code,
            signal,
            error
        }),
    ]
}

fn command() -> impl Strategy<Value = SourceCommand> {
    prop_oneof![
        text().prop_map(SourceCommand::Stop),
        text().prop_map(SourceCommand::Release),
        text().prop_map(SourceCommand::Go),
        text().prop_map(SourceCommand::Hold),
    ]
}

/// A message that was cut off after this share of it, in per cent.
fn beginning(message: &str, share: usize) -> &str {
    let mut end = message.len() * share / 100;
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    &message[..end]
}

proptest! {
    #[test]
    fn arbitrary_messages_never_panic(message in prop_oneof![text(), pieces()], bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        for message in [message.as_bytes(), &bytes] {
            let _ = parse(message);
            let _ = parse_without_descriptor(message);
        }
        let _ = Answer::from_line(&message);
        let _ = EngineFailure::from_error_output(&message);
        let _ = message.parse::<StatusReport>();
        let _ = message.parse::<SourceName>();
    }

    #[test]
    fn requests_are_read_as_they_are_written(request in request()) {
        let wire = serde_json::to_vec(&request).unwrap();
        prop_assert_eq!(&parse(&wire).unwrap(), &request);
        prop_assert!(parse_without_descriptor(&wire).is_err(), "a request without descriptor is no command");
    }

    #[test]
    fn commands_are_read_as_they_are_written(command in command()) {
        let wire = serde_json::to_vec(&command).unwrap();
        prop_assert_eq!(&parse_without_descriptor(&wire).unwrap(), &command);
        prop_assert!(parse(&wire).is_err(), "a command with a descriptor is no request");
    }

    #[test]
    fn answers_are_read_as_they_are_written(answer in answer()) {
        let line = answer.to_line();
        prop_assert_eq!(line.matches('\n').count(), 1);
        prop_assert_eq!(Answer::from_line(&line).unwrap(), answer);
    }

    #[test]
    fn truncated_messages_are_never_half_understood(request in request(), answer in answer(), command in command(), share in 0_usize..100) {
        let request = serde_json::to_string(&request).unwrap();
        let command = serde_json::to_string(&command).unwrap();
        prop_assert!(parse(beginning(&request, share).as_bytes()).is_err());
        prop_assert!(parse_without_descriptor(beginning(&command, share).as_bytes()).is_err());
        prop_assert!(Answer::from_line(beginning(answer.to_line().trim_end(), share)).is_err());
    }

    #[test]
    fn failures_are_read_as_they_are_written(earlier in "[ -~]{0,40}", code in code(), message in text()) {
        let failure = EngineFailure { code, message };
        let line = failure.to_line();
        prop_assert_eq!(line.lines().count(), 1);
        prop_assert_eq!(EngineFailure::from_error_output(&format!("{earlier}\n{line}\n")), failure);
    }

    #[test]
    fn status_texts_are_read_as_they_are_written(
        engines in any::<u64>(),
        cause in prop_oneof![text(), pieces()],
        stall_milliseconds in any::<u64>(),
        is_planned in any::<bool>(),
    ) {
        let report = StatusReport { engines, cause, stall_milliseconds, is_planned };
        let line = report.to_string();
        prop_assert_eq!(line.lines().count(), 1);
        let cause = report.cause.replace(char::is_control, " ");
        prop_assert_eq!(line.parse(), Ok(StatusReport { cause, ..report }));
    }

    #[test]
    fn source_names_are_one_plain_component_and_never_half_understood(name in prop_oneof!["[./a_-]{0,5}", "\\PC{0,5}", "[a-z]{250,260}"]) {
        if let Ok(accepted) = name.parse::<SourceName>() {
            let path = std::path::Path::new("/base").join(accepted.as_str());
            prop_assert_eq!(path.parent(), Some(std::path::Path::new("/base")));
            prop_assert_eq!(path.file_name().and_then(|it| it.to_str()), Some(name.as_str()));
            prop_assert!(name.len() <= 255);
        }
    }
}
