//! The tensors that a PyTorch pickle describes (`torch/_utils.py`, `torch/storage.py`): which
//! storage, which numbers of it, in which shape.

use std::{collections::HashMap, path::Path};

use crate::{
    CheckpointError, DType,
    pickle::{Object, ObjectId, Pickle},
};

/// A type of numbers: its name as a dtype, the class of its typed storages, bytes of a number, and
/// how it is read, if weights can be of it.
#[derive(Debug)]
pub(crate) struct NumberType {
    pub dtype: &'static str,
    storage: &'static str,
    pub bytes: usize,
    pub read_as: Option<DType>,
}

const fn number_type(
    dtype: &'static str,
    storage: &'static str,
    bytes: usize,
    read_as: Option<DType>,
) -> NumberType {
    NumberType { dtype, storage, bytes, read_as }
}

static NUMBER_TYPES: [NumberType; 17] = [
    number_type("float64", "DoubleStorage", 8, Some(DType::F64)),
    number_type("float32", "FloatStorage", 4, Some(DType::F32)),
    number_type("float16", "HalfStorage", 2, Some(DType::F16)),
    number_type("bfloat16", "BFloat16Storage", 2, Some(DType::BF16)),
    number_type("int64", "LongStorage", 8, None),
    number_type("int32", "IntStorage", 4, None),
    number_type("int16", "ShortStorage", 2, None),
    number_type("int8", "CharStorage", 1, None),
    number_type("uint8", "ByteStorage", 1, None),
    number_type("bool", "BoolStorage", 1, None),
    number_type("complex64", "ComplexFloatStorage", 8, None),
    number_type("complex128", "ComplexDoubleStorage", 16, None),
    // Without typed storages of their own.
    number_type("uint16", "", 2, None),
    number_type("uint32", "", 4, None),
    number_type("uint64", "", 8, None),
    number_type("float8_e4m3fn", "", 1, None),
    number_type("float8_e5m2", "", 1, None),
];

const UNTYPED: &str = "UntypedStorage";
/// How tensors were rebuilt: torch 0.1, since 0.4, and of types without typed storages.
const REBUILDS: [&str; 3] = ["_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"];
/// The key under which training scripts keep the weights, beside their own state.
const WRAPPERS: [&str; 2] = ["model", "state_dict"];
/// A parameter of a parameter of a tensor: nothing wraps deeper.
const DEEPEST_WRAPPING: usize = 4;

/// The globals that a file of tensors names; everything else is refused.
pub(crate) fn is_allowed(module: &str, name: &str) -> bool {
    match module {
        "collections" => name == "OrderedDict",
        "torch._utils" => REBUILDS.contains(&name) || name == "_rebuild_parameter",
        "torch._tensor" => name == "_rebuild_from_type_v2",
        "torch.nn.parameter" => name == "Parameter",
        "torch.storage" => matches!(name, UNTYPED | "TypedStorage"),
        "torch" => {
            let number = |kind: &NumberType| {
                kind.dtype == name || (kind.storage == name && !name.is_empty())
            };
            matches!(name, UNTYPED | "Size" | "Tensor" | "device")
                || NUMBER_TYPES.iter().any(number)
        }
        // Bytes, as protocol 2 writes them.
        "_codecs" => name == "encode",
        _ => false,
    }
}

/// A tensor and the storage it lies in; counted in numbers, not bytes.
#[derive(Debug)]
pub(crate) struct TorchTensor {
    pub name: String,
    pub kind: &'static NumberType,
    pub storage: String,
    pub offset: usize,
    pub shape: Vec<usize>,
    pub strides: Vec<usize>,
}

impl TorchTensor {
    /// Numbers from the first to the last that the tensor reaches in its storage; none where that
    /// overflows.
    pub(crate) fn reach(&self) -> Option<usize> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        let mut steps = self.shape.iter().zip(&self.strides);
        steps.try_fold(1usize, |reach, (&size, &stride)| {
            reach.checked_add((size - 1).checked_mul(stride)?)
        })
    }

    /// Numbers in its shape; none where they overflow. Strides of 0 make them more than are stored.
    pub(crate) fn numbers(&self) -> Option<usize> {
        self.shape.iter().try_fold(1usize, |numbers, &size| numbers.checked_mul(size))
    }

    /// Its numbers follow each other, rows first.
    pub(crate) fn is_contiguous(&self) -> bool {
        let mut next = 1usize;
        self.shape.iter().zip(&self.strides).rev().all(|(&size, &stride)| {
            let follows = size == 1 || stride == next;
            next = size.saturating_mul(next);
            follows
        })
    }
}

/// The tensors of the state dict in `pickle`: the whole object, or what a training script keeps
/// under `model` or `state_dict`.
pub(crate) fn read(path: &Path, pickle: &Pickle) -> Result<Vec<TorchTensor>, CheckpointError> {
    let reader = Reader { path, pickle };
    let Some(mut entries) = pickle.dict(pickle.root) else {
        return Err(reader.malformed("a dict of tensors", pickle.kind(pickle.root)));
    };
    let wrapped = |wrapper: &&str| {
        let found = entries.iter().find(|(key, _)| pickle.text(*key) == Some(wrapper));
        found.and_then(|(_, value)| pickle.dict(*value))
    };
    if let Some(inner) = WRAPPERS.iter().find_map(wrapped) {
        entries = inner;
    }
    let named = |&(key, value): &(ObjectId, ObjectId)| match pickle.text(key) {
        Some(name) => reader.tensor(name, value),
        None => Err(reader.malformed("tensors under their names", pickle.kind(key))),
    };
    entries.iter().map(named).collect()
}

/// Bytes of a number in each storage that the pickle names.
pub(crate) fn storage_widths(pickle: &Pickle) -> HashMap<String, usize> {
    let width = |id| {
        let (class, key) = storage_id(pickle, id)?;
        let untyped = pickle.global(class).is_some_and(|(_, name)| name == UNTYPED);
        let kind = number_type_of(pickle, class, |kind| kind.storage);
        Some((key, kind.map(|kind| kind.bytes).or(untyped.then_some(1))?))
    };
    pickle.persistent().filter_map(width).collect()
}

/// Class and key of a storage's `("storage", class, key, location, numbers)`. The oldest files may
/// have a view of another storage as a sixth, which is not read.
fn storage_id(pickle: &Pickle, id: ObjectId) -> Option<(ObjectId, String)> {
    let [tag, class, key, _, _, rest @ ..] = pickle.tuple(id)? else { return None };
    let view = rest.first().is_some_and(|&view| pickle.tuple(view).is_some());
    if view || pickle.text(*tag) != Some("storage") {
        return None;
    }
    Some((*class, pickle.key(*key)?))
}

fn number_type_of(
    pickle: &Pickle,
    global: ObjectId,
    name_of: fn(&NumberType) -> &'static str,
) -> Option<&'static NumberType> {
    let ("torch", name) = pickle.global(global)? else { return None };
    NUMBER_TYPES.iter().find(|kind| name_of(kind) == name)
}

struct Reader<'a> {
    path: &'a Path,
    pickle: &'a Pickle<'a>,
}

impl<'a> Reader<'a> {
    fn tensor(&self, name: &str, object: ObjectId) -> Result<TorchTensor, CheckpointError> {
        let Some((function, args)) = self.rebuild(object) else {
            let found = self.pickle.kind(object);
            return Err(self.refuse(name, "a tensor", found));
        };
        let [storage, offset, size, stride] = args.first_chunk().copied().unwrap_or([object; 4]);
        let offset = self.size(offset);
        let (Some(offset), Some(shape), Some(strides)) =
            (offset, self.sizes(size), self.sizes(stride))
        else {
            let expected = "a storage, an offset, a size and strides";
            return Err(self.refuse(name, expected, "others".to_owned()));
        };
        if shape.len() != strides.len() {
            let found = format!("{} sizes, {} strides", shape.len(), strides.len());
            return Err(self.refuse(name, "a stride for each dimension", found));
        }
        let dtype = args.get(6).filter(|_| function == REBUILDS[2]).copied();
        let (kind, storage) = self.storage(name, storage, dtype)?;
        Ok(TorchTensor { name: name.to_owned(), kind, storage, offset, shape, strides })
    }

    /// Name and arguments of the call that makes a tensor, without what wraps it.
    fn rebuild(&self, mut object: ObjectId) -> Option<(&'a str, &'a [ObjectId])> {
        for _ in 0..DEEPEST_WRAPPING {
            let (global, args) = self.pickle.call(object)?;
            match global {
                ("torch._utils", "_rebuild_parameter") => object = *args.first()?,
                ("torch._tensor", "_rebuild_from_type_v2") => {
                    let (module, name) = self.pickle.global(*args.first()?)?;
                    let args = self.pickle.tuple(*args.get(2)?)?;
                    let known = module == "torch._utils" && REBUILDS.contains(&name);
                    return known.then_some((name, args));
                }
                ("torch._utils", name) if REBUILDS.contains(&name) => return Some((name, args)),
                _ => return None,
            }
        }
        None
    }

    /// Type and key of a storage. `dtype` is the type where the storage itself has none.
    fn storage(
        &self,
        tensor: &str,
        object: ObjectId,
        dtype: Option<ObjectId>,
    ) -> Result<(&'static NumberType, String), CheckpointError> {
        let id = match self.pickle.get(object) {
            Object::Persistent(id) => Some(*id),
            _ => None,
        };
        let Some((class, key)) = id.and_then(|id| storage_id(self.pickle, id)) else {
            let found = self.pickle.kind(object);
            return Err(self.refuse(tensor, "a storage and its key", found));
        };
        let found = match dtype {
            Some(dtype) => number_type_of(self.pickle, dtype, |kind| kind.dtype),
            None => number_type_of(self.pickle, class, |kind| kind.storage),
        };
        found.map(|kind| (kind, key)).ok_or_else(|| {
            let found = self.pickle.kind(dtype.unwrap_or(class));
            self.refuse(tensor, "numbers of a known type", found)
        })
    }

    fn size(&self, object: ObjectId) -> Option<usize> {
        self.pickle.integer(object).and_then(|size| usize::try_from(size).ok())
    }

    /// A tuple of sizes, or a `torch.Size` of one.
    fn sizes(&self, object: ObjectId) -> Option<Vec<usize>> {
        let items = match self.pickle.call(object) {
            Some((("torch", "Size"), &[items])) => items,
            _ => object,
        };
        let items = self.pickle.tuple(items).or_else(|| self.pickle.list(items))?;
        items.iter().map(|&item| self.size(item)).collect()
    }

    fn refuse(&self, tensor: &str, expected: &str, found: String) -> CheckpointError {
        CheckpointError::Tensor {
            path: self.path.to_owned(),
            tensor: tensor.to_owned(),
            expected: expected.to_owned(),
            found,
        }
    }

    fn malformed(&self, expected: &str, found: String) -> CheckpointError {
        CheckpointError::Malformed {
            path: self.path.to_owned(),
            what: "pickle".to_owned(),
            expected: expected.to_owned(),
            found,
        }
    }
}
