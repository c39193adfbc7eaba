//! How an end is told to whoever started `trireme`: one line for a person, one number for a script.

use std::{io, process::ExitCode};

use crate::{
    model_store::StoreError, preflight::Refusal, supervisor::SupervisorError,
    topology::TopologyError,
};

/// Anything that has no number of its own.
const OTHER: u8 = 1;
/// The command line does not parse (clap's own number), or asks for what cannot work.
const COMMAND_LINE: u8 = 2;
/// The model could not be found, fetched or read.
const MODEL: u8 = 3;
/// The model cannot run split in the way asked for.
const PLAN: u8 = 4;
/// A child process failed and was given up.
const CHILD: u8 = 5;
/// Plus the signal that ended it.
const SIGNAL: i32 = 128;

/// Prints the error with its causes and returns the number that stands for its kind.
pub fn report(error: &anyhow::Error) -> ExitCode {
    // A reader that left (`trireme list | head -1`) is no failure worth words.
    let reader_left = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe)
    };
    if !error.chain().any(reader_left) {
        let _ = io::Write::write_fmt(&mut io::stderr(), format_args!("trireme: {error:#}\n"));
    }
    ExitCode::from(of(error))
}

fn of(error: &anyhow::Error) -> u8 {
    let of_cause = |cause: &(dyn std::error::Error + 'static)| {
        if let Some(SupervisorError::Killed { signal }) = cause.downcast_ref() {
            u8::try_from(SIGNAL + signal).ok()
        } else if cause.is::<SupervisorError>() {
            Some(CHILD)
        } else if cause.is::<StoreError>() || cause.is::<trireme_checkpoint::CheckpointError>() {
            Some(MODEL)
        } else if cause.is::<Refusal>() {
            Some(COMMAND_LINE)
        } else if cause.is::<TopologyError>() {
            Some(PLAN)
        } else {
            None
        }
    };
    error.chain().find_map(of_cause).unwrap_or(OTHER)
}
