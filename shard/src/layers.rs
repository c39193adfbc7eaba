//! What models are made of. Layers know how a model is split over ranks; models do not.

pub mod attention;
pub mod decoder;
pub mod embedding;
pub mod linear;
pub mod mixture;
pub mod mlp;
pub mod norm;
pub mod rotary;
pub mod workspace;
