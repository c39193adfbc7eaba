//! The `trireme` command: finds models, plans processes, supervises them, and talks to them.

#![forbid(unsafe_code)]

pub mod answer;
pub mod api_key;
pub mod binaries;
pub mod child_log;
pub mod cli;
pub mod config;
pub mod exit_code;
pub mod gpus;
pub mod instance;
pub mod model_store;
pub mod preflight;
pub mod rpc;
pub mod run_folder;
pub mod size;
pub mod supervisor;
pub mod topology;
mod verbs;

use cli::{Cli, Verb};

/// Runs one verb to its end.
pub fn run(cli: Cli) -> anyhow::Result<()> {
    match cli.verb {
        Verb::Serve(args) => verbs::serve::serve(&args),
        Verb::Download(args) => verbs::store::download(&args),
        Verb::List(args) => verbs::store::list(&args),
        Verb::Where(args) => verbs::store::locate(&args),
        Verb::Remove(args) => verbs::store::remove(&args),
        Verb::Inspect(args) => verbs::inspect::inspect(&args),
        Verb::Generate(args) => verbs::generate::generate(&args),
        Verb::Chat(args) => verbs::chat::chat(&args),
        Verb::Bench(args) => verbs::bench::bench(&args),
        Verb::Eval(args) => verbs::eval::eval(&args),
    }
}
