//! The collectives as their callers see them: as threads and as processes.

mod failures;
mod processes;
mod random;
mod script;
mod threads;
