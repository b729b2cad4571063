//! Calls of `kubectl`, for tests that want to say and see what a person would.

use std::io::{self, Write as _};
use std::process::{Command, Output, Stdio};

#[derive(Debug, thiserror::Error)]
pub enum KubectlError {
    #[error("failed to run kubectl {arguments}")]
    Run {
        arguments: String,
        #[source]
        cause: io::Error,
    },
    #[error("kubectl {arguments}: {message}")]
    Refused { arguments: String, message: String },
}

/// Runs a command that is already everything up to kubectl's own arguments, and returns what it printed.
pub(super) fn run(mut kubectl: Command, arguments: &[&str], input: Option<&str>) -> Result<String, KubectlError> {
    kubectl.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
    let said = arguments.join(" ");
    let output = output(kubectl, input).map_err(|cause| KubectlError::Run { arguments: said.clone(), cause })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(KubectlError::Refused { arguments: said, message })
}

fn output(mut kubectl: Command, input: Option<&str>) -> io::Result<Output> {
    let Some(input) = input else { return kubectl.stdin(Stdio::null()).output() };
    let mut child = kubectl.stdin(Stdio::piped()).spawn()?;
    // Objects are smaller than kubectl's willingness to read: it reads everything before it writes anything.
    let written = child.stdin.take().map_or(Ok(()), |mut pipe| pipe.write_all(input.as_bytes()));
    let output = child.wait_with_output()?;
    // A kubectl that refuses its flags reads nothing; what it says then is the better message.
    if output.status.success() {
        written?;
    }
    Ok(output)
}
