//! The harness of the scenarios: a real `trireme serve` with its children, an HTTP client that
//! reads streams, a look at processes, and an OTLP receiver.

#![forbid(unsafe_code)]

pub mod client;
pub mod fixture;
pub mod otlp;
pub mod process;
pub mod server;
