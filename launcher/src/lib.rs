//! The `trireme` command: finds models, plans processes, supervises them, and talks to them.

#![forbid(unsafe_code)]

pub mod binaries;
pub mod cli;
pub mod config;
pub mod exit_code;
pub mod model_store;
pub mod size;
pub mod topology;
mod verbs;

use cli::{Cli, Verb};

/// Runs one verb to its end.
pub fn run(cli: Cli) -> anyhow::Result<()> {
    match cli.verb {
        Verb::Download(args) => verbs::store::download(&args),
        Verb::List(args) => verbs::store::list(&args),
        Verb::Where(args) => verbs::store::locate(&args),
        Verb::Remove(args) => verbs::store::remove(&args),
        Verb::Inspect(args) => verbs::inspect::inspect(&args),
        Verb::Serve(_) | Verb::Generate(_) | Verb::Chat(_) | Verb::Bench(_) => {
            anyhow::bail!("this verb is being built")
        }
    }
}
