//! Model families. A model file reads like the paper and never mentions a rank.

pub mod llama;
