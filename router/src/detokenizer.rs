//! Ids to text, one at a time: never half a character, never a lost space, and the texts of all
//! ids join to the text of the whole answer.

use std::sync::Arc;

use trireme_checkpoint::TextSources;

use crate::vocabulary::{Joining, Vocabulary};

const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// What decoding needs of a model; shared by all requests.
pub struct TextDecoder {
    pub sources: TextSources,
    pub vocabulary: Vocabulary,
}

impl TextDecoder {
    pub fn new(sources: TextSources) -> Self {
        let vocabulary = Vocabulary::of(&sources.tokenizer);
        Self { sources, vocabulary }
    }

    /// Ids that the tokenizer does not know give no text.
    fn decode(&self, ids: &[u32]) -> String {
        self.sources.tokenizer.decode(ids, false).unwrap_or_default()
    }
}

/// One answer being decoded.
pub struct Detokenizer {
    decoder: Arc<TextDecoder>,
    skip_special: bool,
    state: State,
}

enum State {
    /// Bytes of a character that is not complete.
    Bytes {
        pending: Vec<u8>,
        broken: Broken,
        drops_space: bool,
    },
    Window(Window),
}

/// What stands for bytes that are no part of a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    /// One replacement for what could have begun a character (`String::from_utf8_lossy`).
    ByCharacter,
    ByByte,
}

/// For decoders whose text of an id depends on its neighbours: the ids since a point where the
/// text was whole, with the id before that point to keep its leading space.
#[derive(Default)]
struct Window {
    ids: Vec<u32>,
    /// Where the ids after the last whole text begin.
    read: usize,
    /// How much of the window's text has been handed out.
    sent_bytes: usize,
}

impl Detokenizer {
    pub fn new(decoder: Arc<TextDecoder>, skip_special: bool) -> Self {
        let bytes = |broken, drops_space| State::Bytes { pending: Vec::new(), broken, drops_space };
        let state = match decoder.vocabulary.joining() {
            Joining::Bytes => bytes(Broken::ByCharacter, false),
            Joining::Pieces { drops_first_space } => bytes(Broken::ByByte, drops_first_space),
            Joining::Unknown => State::Window(Window::default()),
        };
        Self { decoder, skip_special, state }
    }

    /// The text that is certain with `id`; may be empty.
    pub fn push(&mut self, id: u32) -> String {
        if self.skip_special && self.decoder.vocabulary.is_special(id) {
            return String::new();
        }
        match &mut self.state {
            State::Bytes { pending, broken, drops_space } => {
                let bytes = self.decoder.vocabulary.bytes(id);
                let is_first = std::mem::replace(drops_space, *drops_space && bytes.is_empty());
                let bytes = bytes.strip_prefix(b" ").filter(|_| is_first).unwrap_or(bytes);
                pending.extend_from_slice(bytes);
                take_whole_characters(pending, *broken)
            }
            State::Window(window) => window.push(&self.decoder, id),
        }
    }

    /// What is left when no more ids come: broken characters.
    pub fn finish(&mut self) -> String {
        match &mut self.state {
            State::Bytes { pending, broken, .. } => lossy(&std::mem::take(pending), *broken),
            State::Window(window) => window.finish(&self.decoder),
        }
    }
}

/// Takes all but an unfinished character from the front; what can never become a character is
/// replaced.
fn take_whole_characters(pending: &mut Vec<u8>, broken: Broken) -> String {
    let unfinished = match pending.utf8_chunks().last() {
        // Only the last chunk's invalid part can be a character's start, and only if one more
        // byte could continue it.
        Some(chunk) if is_unfinished(chunk.invalid()) => chunk.invalid().len(),
        _ => 0,
    };
    let rest = pending.split_off(pending.len() - unfinished);
    let whole = std::mem::replace(pending, rest);
    match String::from_utf8(whole) {
        Ok(text) => text,
        Err(error) => lossy(error.as_bytes(), broken),
    }
}

fn lossy(bytes: &[u8], broken: Broken) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        let replaced = match broken {
            Broken::ByCharacter => chunk.invalid().len().min(1),
            Broken::ByByte => chunk.invalid().len(),
        };
        text.extend(std::iter::repeat_n(REPLACEMENT, replaced));
    }
    text
}

fn is_unfinished(tail: &[u8]) -> bool {
    // `error_len` is None exactly when the input ended inside a character.
    std::str::from_utf8(tail).is_err_and(|error| error.error_len().is_none())
}

impl Window {
    fn push(&mut self, decoder: &TextDecoder, id: u32) -> String {
        if decoder.sources.tokenizer.id_to_token(id).is_none() {
            return String::new(); // It would stand between two tokens that are neighbours.
        }
        self.ids.push(id);
        let text = decoder.decode(&self.ids);
        let whole = text.trim_end_matches(REPLACEMENT);
        let Some(new) = whole.get(self.sent_bytes..) else { return String::new() };
        let new = new.to_owned();
        self.sent_bytes += new.len();
        if whole.len() == text.len() {
            // Whole: the next ids are read with these before them, and no others.
            self.ids.drain(..self.read);
            self.read = self.ids.len();
            self.sent_bytes = decoder.decode(&self.ids).len();
        }
        new
    }

    fn finish(&mut self, decoder: &TextDecoder) -> String {
        let text = decoder.decode(&self.ids);
        let rest = text.get(self.sent_bytes..).unwrap_or_default().to_owned();
        *self = Self::default();
        rest
    }
}

#[cfg(test)]
mod tests;
