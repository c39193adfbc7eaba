//! `trireme`: reads the command line, runs one verb, says how it ended.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use trireme_launcher::{cli::Cli, exit_code};

fn main() -> ExitCode {
    match trireme_launcher::run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit_code::report(&error),
    }
}
