//! Python pickles (`pickletools.py`, protocols 2 to 5), read and never run: a global is a name, a
//! call is a note of what would be called with what. Names outside the caller's list are refused.
//!
//! candle's reader (`candle_core::pickle`) is not used: it knows protocol 2 alone, copies an object
//! each time it is named (so that a small file can ask for endless memory), takes any global, and
//! passes over what it does not understand.

use std::{collections::HashMap, path::Path};

use crate::CheckpointError;

/// A checkpoint of ten thousand tensors has a pickle of a few megabytes.
const LARGEST_PICKLE_BYTES: usize = 64 << 20;
const MOST_OBJECTS: usize = 1 << 22;
const NEWEST_PROTOCOL: u64 = 5;

/// An object's place in [`Pickle`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ObjectId(u32);

/// What a pickle describes, as far as tensors need it. Parts are named by their ids, so an object
/// that is named often is held once, and nothing is walked deeper than a caller asks.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Object<'a> {
    /// Something that no tensor is described by.
    Opaque(&'static str),
    Bool(bool),
    Integer(i128),
    Text(&'a str),
    Global {
        module: &'a str,
        name: &'a str,
    },
    Tuple(Vec<ObjectId>),
    List(Vec<ObjectId>),
    Dict(Vec<(ObjectId, ObjectId)>),
    /// `global(*args)`, which is not called.
    Call {
        global: ObjectId,
        args: ObjectId,
    },
    /// Something that is kept outside of the pickle.
    Persistent(ObjectId),
}

/// The objects of one pickle.
#[derive(Debug)]
pub(crate) struct Pickle<'a> {
    objects: Vec<Object<'a>>,
    pub root: ObjectId,
    /// Bytes up to and with its end.
    pub length: usize,
}

impl<'a> Pickle<'a> {
    /// Reads the pickle that `bytes` begin with. `allowed` says which globals (module, name) may be
    /// named at all. `path` is for messages.
    pub(crate) fn read(
        path: &'a Path,
        bytes: &'a [u8],
        allowed: fn(&str, &str) -> bool,
    ) -> Result<Self, CheckpointError> {
        let bytes = &bytes[..bytes.len().min(LARGEST_PICKLE_BYTES)];
        let (objects, stack, marks, memo) = (Vec::new(), Vec::new(), Vec::new(), HashMap::new());
        let mut machine = Machine { path, bytes, at: 0, allowed, objects, stack, marks, memo };
        loop {
            let operation = machine.number(1)? as u8;
            if operation == b'.' {
                let [root] = machine.top()?;
                return Ok(Self { objects: machine.objects, root, length: machine.at });
            }
            let known = machine.literal(operation)?
                || machine.collect(operation)?
                || machine.refer(operation)?;
            if !known {
                let found = format!("{operation:#04x}");
                return Err(machine.refuse("an operation of protocols 2 to 5", found));
            }
        }
    }

    /// What the pickle says is kept outside of it.
    pub(crate) fn persistent(&self) -> impl Iterator<Item = ObjectId> {
        self.objects.iter().filter_map(|object| match object {
            Object::Persistent(id) => Some(*id),
            _ => None,
        })
    }

    pub(crate) fn get(&self, id: ObjectId) -> &Object<'a> {
        &self.objects[id.0 as usize]
    }

    pub(crate) fn tuple(&self, id: ObjectId) -> Option<&[ObjectId]> {
        if let Object::Tuple(items) = self.get(id) { Some(items) } else { None }
    }

    pub(crate) fn list(&self, id: ObjectId) -> Option<&[ObjectId]> {
        if let Object::List(items) = self.get(id) { Some(items) } else { None }
    }

    pub(crate) fn dict(&self, id: ObjectId) -> Option<&[(ObjectId, ObjectId)]> {
        if let Object::Dict(entries) = self.get(id) { Some(entries) } else { None }
    }

    pub(crate) fn text(&self, id: ObjectId) -> Option<&'a str> {
        if let Object::Text(text) = self.get(id) { Some(text) } else { None }
    }

    pub(crate) fn integer(&self, id: ObjectId) -> Option<i128> {
        if let Object::Integer(value) = self.get(id) { Some(*value) } else { None }
    }

    pub(crate) fn is_true(&self, id: ObjectId) -> bool {
        *self.get(id) == Object::Bool(true)
    }

    /// A text, or the text of a number.
    pub(crate) fn key(&self, id: ObjectId) -> Option<String> {
        let number = || self.integer(id).map(|number| number.to_string());
        self.text(id).map(str::to_owned).or_else(number)
    }

    /// Module and name of a global.
    pub(crate) fn global(&self, id: ObjectId) -> Option<(&'a str, &'a str)> {
        if let Object::Global { module, name } = self.get(id) { Some((module, name)) } else { None }
    }

    /// Module and name of what would be called, and its arguments.
    pub(crate) fn call(&self, id: ObjectId) -> Option<((&'a str, &'a str), &[ObjectId])> {
        let Object::Call { global, args } = self.get(id) else { return None };
        Some((self.global(*global)?, self.tuple(*args)?))
    }

    /// A word for messages.
    pub(crate) fn kind(&self, id: ObjectId) -> String {
        match self.get(id) {
            Object::Opaque(kind) => (*kind).to_owned(),
            Object::Bool(_) => "a bool".to_owned(),
            Object::Integer(_) => "an integer".to_owned(),
            Object::Text(_) => "a text".to_owned(),
            Object::Global { module, name } => format!("the global {module}.{name}"),
            Object::Tuple(_) => "a tuple".to_owned(),
            Object::List(_) => "a list".to_owned(),
            Object::Dict(_) => "a dict".to_owned(),
            Object::Persistent(_) => "a storage".to_owned(),
            Object::Call { global, .. } => match self.global(*global) {
                Some((module, name)) => format!("a call of {module}.{name}"),
                None => "a call".to_owned(),
            },
        }
    }
}

/// The pickle's stack machine.
struct Machine<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    at: usize,
    allowed: fn(&str, &str) -> bool,
    objects: Vec<Object<'a>>,
    stack: Vec<ObjectId>,
    /// Heights of the stack at the marks.
    marks: Vec<usize>,
    memo: HashMap<u64, ObjectId>,
}

impl<'a> Machine<'a> {
    /// Operations that push a value of their own.
    fn literal(&mut self, operation: u8) -> Result<bool, CheckpointError> {
        let object = match operation {
            b'N' => Object::Opaque("None"),
            0x88 | 0x89 => Object::Bool(operation == 0x88),
            b'G' => {
                self.take(8)?;
                Object::Opaque("a float")
            }
            b'K' => Object::Integer(self.number(1)?.into()),
            b'M' => Object::Integer(self.number(2)?.into()),
            b'J' => self.integer(4)?,
            0x8a => {
                let length = self.number(1)?;
                self.integer(length)?
            }
            0x8b => {
                let length = self.number(4)?;
                self.integer(length)?
            }
            b'X' => self.text(4)?,
            0x8c => self.text(1)?,
            0x8d => self.text(8)?,
            // Texts of Python 2, which are bytes.
            b'U' => self.text(1)?,
            b'T' => self.text(4)?,
            b'C' => self.blob(1)?,
            b'B' => self.blob(4)?,
            0x8e | 0x96 => self.blob(8)?,
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.named(module, name)?
            }
            _ => return Ok(false),
        };
        self.push(object)?;
        Ok(true)
    }

    /// Operations that gather what is on the stack.
    fn collect(&mut self, operation: u8) -> Result<bool, CheckpointError> {
        match operation {
            b')' => self.push(Object::Tuple(Vec::new()))?,
            0x85 => {
                let items = self.top::<1>()?.to_vec();
                self.push(Object::Tuple(items))?;
            }
            0x86 => {
                let items = self.top::<2>()?.to_vec();
                self.push(Object::Tuple(items))?;
            }
            0x87 => {
                let items = self.top::<3>()?.to_vec();
                self.push(Object::Tuple(items))?;
            }
            b't' => {
                let items = self.since_mark()?;
                self.push(Object::Tuple(items))?;
            }
            // A set is as good as a list here.
            b']' | 0x8f => self.push(Object::List(Vec::new()))?,
            b'l' | 0x91 => {
                let items = self.since_mark()?;
                self.push(Object::List(items))?;
            }
            b'a' => {
                let item = self.top::<1>()?;
                self.extend(&item)?;
            }
            b'e' | 0x90 => {
                let items = self.since_mark()?;
                self.extend(&items)?;
            }
            b'}' => self.push(Object::Dict(Vec::new()))?,
            b'd' => {
                let items = self.since_mark()?;
                self.push(Object::Dict(Vec::new()))?;
                self.set(&items)?;
            }
            b's' => {
                let items = self.top::<2>()?;
                self.set(&items)?;
            }
            b'u' => {
                let items = self.since_mark()?;
                self.set(&items)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Operations that move, remember or name objects.
    fn refer(&mut self, operation: u8) -> Result<bool, CheckpointError> {
        match operation {
            0x80 => {
                let protocol = self.number(1)?;
                if !(2..=NEWEST_PROTOCOL).contains(&protocol) {
                    return Err(self.refuse("protocol 2 to 5", format!("protocol {protocol}")));
                }
            }
            // The length of a frame: the operations in it follow.
            0x95 => _ = self.take(8)?,
            b'(' => self.marks.push(self.stack.len()),
            b'0' => _ = self.top::<1>()?,
            b'1' => _ = self.since_mark()?,
            b'2' => {
                let [object] = self.top()?;
                self.stack.extend([object, object]);
            }
            b'q' => self.remember(1)?,
            b'r' => self.remember(4)?,
            0x94 => {
                let [object] = self.top()?;
                self.memo.insert(self.memo.len() as u64, object);
                self.stack.push(object);
            }
            b'h' => self.recall(1)?,
            b'j' => self.recall(4)?,
            0x93 => {
                let [module, name] = self.top()?;
                let (module, name) = (self.object(module), self.object(name));
                let (&Object::Text(module), &Object::Text(name)) = (module, name) else {
                    return Err(self.refuse("a global's module and name", "others".to_owned()));
                };
                let object = self.named(module, name)?;
                self.push(object)?;
            }
            b'R' | 0x81 => self.call()?,
            // The state that would be given to an object: attributes beside a dict's entries, or of
            // a tensor; its numbers are never there.
            b'b' => _ = self.top::<1>()?,
            b'Q' => {
                let [id] = self.top()?;
                self.push(Object::Persistent(id))?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// An ordered dict is a dict; every other call is noted.
    fn call(&mut self) -> Result<(), CheckpointError> {
        let [global, args] = self.top()?;
        let (&Object::Global { module, name }, Object::Tuple(items)) =
            (self.object(global), self.object(args))
        else {
            return Err(self.refuse("a global and a tuple to call it with", "others".to_owned()));
        };
        if (module, name) != ("collections", "OrderedDict") {
            return self.push(Object::Call { global, args });
        }
        let mut entries = Vec::new();
        for &list in items {
            let Object::List(pairs) = self.object(list) else {
                return Err(self.refuse("an ordered dict of a list", "another".to_owned()));
            };
            for &pair in pairs {
                match self.object(pair) {
                    Object::Tuple(pair) | Object::List(pair) if pair.len() == 2 => {
                        entries.push((pair[0], pair[1]));
                    }
                    _ => return Err(self.refuse("an ordered dict of pairs", "another".to_owned())),
                }
            }
        }
        self.push(Object::Dict(entries))
    }

    fn named(&self, module: &'a str, name: &'a str) -> Result<Object<'a>, CheckpointError> {
        if (self.allowed)(module, name) {
            return Ok(Object::Global { module, name });
        }
        let found = format!("the global {module}.{name}, which is not allowed (nothing was run)");
        Err(self.refuse("only what describes tensors", found))
    }

    fn object(&self, id: ObjectId) -> &Object<'a> {
        &self.objects[id.0 as usize]
    }

    fn push(&mut self, object: Object<'a>) -> Result<(), CheckpointError> {
        if self.objects.len() == MOST_OBJECTS {
            return Err(self.refuse(&format!("at most {MOST_OBJECTS} objects"), "more".to_owned()));
        }
        self.stack.push(ObjectId(self.objects.len() as u32));
        self.objects.push(object);
        Ok(())
    }

    /// Takes the last `N` objects off the stack; a mark protects what is below it.
    fn top<const N: usize>(&mut self) -> Result<[ObjectId; N], CheckpointError> {
        let base = self.marks.last().copied().unwrap_or(0);
        match self.stack[base..].last_chunk::<N>().copied() {
            Some(items) => {
                self.stack.truncate(self.stack.len() - N);
                Ok(items)
            }
            None => Err(self.refuse(&format!("{N} objects on the stack"), "fewer".to_owned())),
        }
    }

    fn since_mark(&mut self) -> Result<Vec<ObjectId>, CheckpointError> {
        match self.marks.pop() {
            Some(height) => Ok(self.stack.split_off(height)),
            None => Err(self.refuse("a mark on the stack", "none".to_owned())),
        }
    }

    /// The object on top of the stack, which stays there.
    fn target(&mut self) -> Option<&mut Object<'a>> {
        let base = self.marks.last().copied().unwrap_or(0);
        let id = *self.stack[base..].last()?;
        self.objects.get_mut(id.0 as usize)
    }

    fn extend(&mut self, items: &[ObjectId]) -> Result<(), CheckpointError> {
        if let Some(Object::List(list)) = self.target() {
            list.extend_from_slice(items);
            return Ok(());
        }
        Err(self.refuse("a list to append to", "another".to_owned()))
    }

    fn set(&mut self, items: &[ObjectId]) -> Result<(), CheckpointError> {
        let (pairs, rest) = items.as_chunks::<2>();
        if let (Some(Object::Dict(entries)), []) = (self.target(), rest) {
            entries.extend(pairs.iter().map(|&[key, value]| (key, value)));
            return Ok(());
        }
        Err(self.refuse("a dict and pairs to put into it", "others".to_owned()))
    }

    fn remember(&mut self, width: u64) -> Result<(), CheckpointError> {
        let number = self.number(width)?;
        let [object] = self.top()?;
        self.memo.insert(number, object);
        self.stack.push(object);
        Ok(())
    }

    fn recall(&mut self, width: u64) -> Result<(), CheckpointError> {
        let number = self.number(width)?;
        match self.memo.get(&number) {
            Some(object) => self.stack.push(*object),
            None => return Err(self.refuse("a remembered object", format!("number {number}"))),
        }
        Ok(())
    }

    fn take(&mut self, length: u64) -> Result<&'a [u8], CheckpointError> {
        let left = self.bytes.len() - self.at;
        if length > left as u64 {
            let found = format!("{left} left (the file may be truncated)");
            return Err(self.refuse(&format!("{length} bytes"), found));
        }
        let start = self.at;
        self.at += length as usize;
        Ok(&self.bytes[start..self.at])
    }

    /// An unsigned number of `width` bytes, at most 8.
    fn number(&mut self, width: u64) -> Result<u64, CheckpointError> {
        let mut bytes = [0; 8];
        bytes[..width as usize].copy_from_slice(self.take(width)?);
        Ok(u64::from_le_bytes(bytes))
    }

    /// A signed number; one of more than 16 bytes is no size of anything.
    fn integer(&mut self, width: u64) -> Result<Object<'a>, CheckpointError> {
        let digits = self.take(width)?;
        let negative = digits.last().is_some_and(|&last| last >= 0x80);
        let mut bytes = [if negative { 0xff } else { 0 }; 16];
        match bytes.get_mut(..digits.len()) {
            Some(low) => low.copy_from_slice(digits),
            None => return Ok(Object::Opaque("a huge integer")),
        }
        Ok(Object::Integer(i128::from_le_bytes(bytes)))
    }

    fn text(&mut self, width: u64) -> Result<Object<'a>, CheckpointError> {
        let length = self.number(width)?;
        let bytes = self.take(length)?;
        Ok(std::str::from_utf8(bytes).map_or(Object::Opaque("bytes"), Object::Text))
    }

    fn blob(&mut self, width: u64) -> Result<Object<'a>, CheckpointError> {
        let length = self.number(width)?;
        self.take(length)?;
        Ok(Object::Opaque("bytes"))
    }

    fn line(&mut self) -> Result<&'a str, CheckpointError> {
        let rest = &self.bytes[self.at..];
        let length = rest.iter().position(|&byte| byte == b'\n').unwrap_or(rest.len());
        let line = self.take(length as u64 + 1)?;
        match std::str::from_utf8(&line[..length]) {
            Ok(line) => Ok(line),
            Err(error) => Err(self.refuse("a global's name as text", error.to_string())),
        }
    }

    fn refuse(&self, expected: &str, found: String) -> CheckpointError {
        CheckpointError::Malformed {
            path: self.path.to_owned(),
            what: format!("pickle, before its byte {}", self.at),
            expected: expected.to_owned(),
            found,
        }
    }
}

#[cfg(test)]
#[path = "pickle_tests.rs"]
mod tests;
