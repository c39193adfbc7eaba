//! Ids to text, one at a time: never half a character, never a lost space, and the texts of all
//! ids join to the text of the whole answer.

use std::sync::Arc;

use trireme_checkpoint::TextSources;

use crate::vocabulary::Vocabulary;

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

    /// The spellings of all special tokens.
    pub fn special_tokens(&self) -> Vec<String> {
        let added = self.sources.tokenizer.get_added_tokens_decoder();
        added.into_values().filter(|token| token.special).map(|token| token.content).collect()
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
    Bytes(Vec<u8>),
    Window(Window),
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
        let state = match decoder.vocabulary.is_byte_level() {
            true => State::Bytes(Vec::new()),
            false => State::Window(Window::default()),
        };
        Self { decoder, skip_special, state }
    }

    /// The text that is certain with `id`; may be empty.
    pub fn push(&mut self, id: u32) -> String {
        if self.skip_special && self.decoder.vocabulary.is_special(id) {
            return String::new();
        }
        match &mut self.state {
            State::Bytes(pending) => {
                pending.extend_from_slice(self.decoder.vocabulary.bytes(id));
                take_whole_characters(pending)
            }
            State::Window(window) => window.push(&self.decoder, id),
        }
    }

    /// What is left when no more ids come: broken characters.
    pub fn finish(&mut self) -> String {
        match &mut self.state {
            State::Bytes(pending) => String::from_utf8_lossy(&std::mem::take(pending)).into_owned(),
            State::Window(window) => window.finish(&self.decoder),
        }
    }
}

/// Takes all but an unfinished character from the front; what can never become a character is
/// replaced as `String::from_utf8_lossy` does.
fn take_whole_characters(pending: &mut Vec<u8>) -> String {
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
        Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
    }
}

fn is_unfinished(tail: &[u8]) -> bool {
    // `error_len` is None exactly when the input ended inside a character.
    std::str::from_utf8(tail).is_err_and(|error| error.error_len().is_none())
}

impl Window {
    fn push(&mut self, decoder: &TextDecoder, id: u32) -> String {
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
