//! What `trireme` can be told to do, one file a verb.

pub mod bench;
pub mod chat;
pub mod eval;
pub mod generate;
pub mod inspect;
pub mod serve;
mod session;
pub mod store;

/// One thread for everything: it is the main thread, which outlives every child it starts.
fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}
