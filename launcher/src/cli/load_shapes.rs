//! The loads of `bench`, as they are written on the command line.

use std::{num::NonZeroUsize, str::FromStr};

/// `REQUESTSxCONCURRENCY`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadShape {
    pub requests: NonZeroUsize,
    pub concurrency: NonZeroUsize,
}

impl FromStr for LoadShape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let [requests, concurrency] = numbers(text, ["requests", "concurrency"], "100x8")?;
        Ok(Self { requests, concurrency })
    }
}

/// `PROMPTSxTOKENS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MixedShape {
    pub prompts: NonZeroUsize,
    pub tokens: NonZeroUsize,
}

impl FromStr for MixedShape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let [prompts, tokens] = numbers(text, ["prompts", "tokens"], "8x8000")?;
        Ok(Self { prompts, tokens })
    }
}

/// Two numbers with an `x` between them.
fn numbers(text: &str, names: [&str; 2], example: &str) -> Result<[NonZeroUsize; 2], String> {
    let parts = text.split_once(['x', '×']).ok_or_else(|| {
        let names = names.map(str::to_uppercase).join("x");
        format!("'{text}' is not {names}, such as {example}")
    })?;
    let number = |name: &str, text: &str| {
        text.parse::<NonZeroUsize>().map_err(|e| format!("{name} '{text}': {e}"))
    };
    Ok([number(names[0], parts.0)?, number(names[1], parts.1)?])
}
