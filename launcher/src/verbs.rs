//! What `trireme` can be told to do, one file a verb.

pub mod inspect;
pub mod store;
