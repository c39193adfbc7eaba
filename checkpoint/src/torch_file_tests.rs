use std::io::Write;

use zip::{ZipWriter, write::SimpleFileOptions};

use super::*;

fn text(text: &str) -> Vec<u8> {
    [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat()
}

fn global(name: &str) -> Vec<u8> {
    let (module, name) = name.rsplit_once('.').unwrap();
    format!("c{module}\n{name}\n").into_bytes()
}

fn tuple(items: &[Vec<u8>]) -> Vec<u8> {
    [b"(", items.concat().as_slice(), b"t"].concat()
}

fn sizes(sizes: &[i64]) -> Vec<u8> {
    let integer = |size: &i64| [b"\x8a\x08".as_slice(), &size.to_le_bytes()].concat();
    tuple(&sizes.iter().map(integer).collect::<Vec<_>>())
}

fn call(function: &str, args: &[Vec<u8>]) -> Vec<u8> {
    [global(function), tuple(args), b"R".to_vec()].concat()
}

fn storage(class: &str, key: &str) -> Vec<u8> {
    let id = [text("storage"), global(class), text(key), text("cpu"), b"K\x01".to_vec()];
    [tuple(&id), b"Q".to_vec()].concat()
}

/// `_rebuild_tensor_v2(storage, offset, size, strides, requires_grad, hooks)`.
fn tensor(class: &str, key: &str, offset: i64, size: &[i64], strides: &[i64]) -> Vec<u8> {
    let offset = sizes(&[offset])[1..11].to_vec();
    let (class, nothing) = (format!("torch.{class}"), b"N".to_vec());
    let args =
        [storage(&class, key), offset, sizes(size), sizes(strides), b"\x89".to_vec(), nothing];
    call("torch._utils._rebuild_tensor_v2", &args)
}

/// An archive of the pickle of `entries`, and of `storages`.
fn archive(entries: &[(&str, Vec<u8>)], storages: &[(&str, &[u8])]) -> Vec<u8> {
    let mut pickle = b"\x80\x02}(".to_vec();
    for (name, object) in entries {
        pickle.extend([text(name), object.clone()].concat());
    }
    pickle.extend(b"u.");
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    let stored = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    let mut add = |name: &str, bytes: &[u8]| {
        writer.start_file(format!("a/{name}"), stored).unwrap();
        writer.write_all(bytes).unwrap();
    };
    add("data.pkl", &pickle);
    for (key, bytes) in storages {
        add(key, bytes);
    }
    writer.finish().unwrap().into_inner()
}

/// The tensors of a file of these bytes, each as `name dtype shape strides: its first number`.
fn read(bytes: &[u8]) -> Result<Vec<String>, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.pth");
    std::fs::write(&path, bytes).unwrap();
    let file = MappedFile::open(&path).map_err(|error| error.to_string())?;
    let tensors = read_tensors(&file).map_err(|error| error.to_string())?;
    let show = |tensor: StoredTensor| {
        let mut first = [0f32];
        let start = tensor.offset;
        let bytes = start..start + tensor.dtype.block_bytes();
        tensor.dtype.dequantise(&file.bytes()[bytes], &mut first);
        let StoredTensor { name, dtype, shape, strides, .. } = tensor;
        let strides = strides.map_or(String::new(), |strides| format!(" by {strides:?}"));
        format!("{name} {dtype} {shape:?}{strides}: {}", first[0])
    };
    Ok(tensors.into_iter().map(show).collect())
}

fn floats(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

/// What `nn.Parameter` makes of the third number of storage 0.
fn parameter() -> Vec<u8> {
    let data = tensor("FloatStorage", "0", 2, &[1], &[1]);
    call("torch._utils._rebuild_parameter", &[data, b"\x88N".to_vec()])
}

/// A subclass's, of the fourth number of storage 0.
fn of_type() -> Vec<u8> {
    let args = [
        storage("torch.FloatStorage", "0"),
        b"K\x03".to_vec(),
        sizes(&[1]),
        sizes(&[1]),
        b"\x89N".to_vec(),
    ];
    let function = global("torch._utils._rebuild_tensor_v2");
    let class = global("torch.nn.parameter.Parameter");
    call("torch._tensor._rebuild_from_type_v2", &[function, class, tuple(&args), b"}".to_vec()])
}

/// The second bf16 number of storage 2, which has no type itself.
fn untyped() -> Vec<u8> {
    let args = [
        storage("torch.storage.UntypedStorage", "2"),
        b"K\x01".to_vec(),
        sizes(&[1]),
        sizes(&[1]),
        b"\x89N".to_vec(),
        global("torch.bfloat16"),
    ];
    call("torch._utils._rebuild_tensor_v3", &args)
}

#[test]
fn every_kind_of_storage_and_view_is_read() {
    let float =
        |offset, size: &[i64], strides: &[i64]| tensor("FloatStorage", "0", offset, size, strides);
    let wide: Vec<u8> = [1.5f64, 2.5].iter().flat_map(|value| value.to_le_bytes()).collect();
    let entries = [
        ("whole", float(0, &[3, 4], &[4, 1])),
        ("from", float(4, &[2, 4], &[4, 1])),
        ("turned", float(0, &[4, 3], &[1, 4])),
        ("columns", float(1, &[3, 2], &[4, 1])),
        ("every third", float(0, &[4], &[3])),
        ("one row", float(8, &[1, 4], &[99, 1])),
        ("repeated", float(5, &[7, 2], &[0, 1])),
        ("empty", float(12, &[0, 4], &[4, 1])),
        ("scalar", float(7, &[], &[])),
        ("parameter", parameter()),
        ("of a type", of_type()),
        ("wide", tensor("DoubleStorage", "1", 1, &[1], &[1])),
        ("bare", untyped()),
        // Buffers, whatever they are made of.
        ("causal_mask", tensor("BoolStorage", "3", 0, &[2], &[1])),
    ];
    let bf16 = [0, 0, 0x80, 0xbf];
    let numbers = floats((0..12).map(|value| value as f32));
    let bytes = archive(
        &entries,
        &[
            ("data/0", &numbers),
            ("data/1", &wide),
            ("data/2", &bf16),
            ("data/3", &[0, 1]),
            ("byteorder", b"little"),
        ],
    );
    // A tensor without numbers, and its storage's end, have no first number to show.
    let found = read(&bytes).unwrap();
    assert_eq!(
        found,
        [
            "whole F32 [3, 4]: 0",
            "from F32 [2, 4]: 4",
            "turned F32 [4, 3] by [1, 4]: 0",
            "columns F32 [3, 2] by [4, 1]: 1",
            "every third F32 [4] by [0, 3]: 0",
            "one row F32 [1, 4]: 8",
            "repeated F32 [7, 2] by [0, 1]: 5",
            &found[7],
            "scalar F32 []: 7",
            "parameter F32 [1]: 2",
            "of a type F32 [1]: 3",
            "wide F64 [1]: 2.5",
            "bare BF16 [1]: -1",
        ]
    );
    assert!(found[7].starts_with("empty F32 [0, 4]"), "{found:?}");
}

#[test]
fn what_is_beside_the_weights_is_passed_over() {
    let weight = tensor("FloatStorage", "0", 0, &[1], &[1]);
    let state = [b"}".to_vec(), text("step"), b"K\x05s".to_vec()].concat();
    for wrapper in ["model", "state_dict"] {
        let inner = [b"}".to_vec(), text("w"), weight.clone(), b"s".to_vec()].concat();
        let entries = [("optimizer", state.clone()), (wrapper, inner), ("lr", b"K\x01".to_vec())];
        let bytes = archive(&entries, &[("data/0", &floats([4.0]))]);
        assert_eq!(read(&bytes).unwrap(), ["w F32 [1]: 4"]);
    }
    let bytes =
        archive(&[("w", weight), ("step", b"K\x05".to_vec())], &[("data/0", &floats([4.0]))]);
    let message = read(&bytes).unwrap_err();
    assert!(message.contains("`step`") && message.contains("an integer"), "{message}");
}

#[test]
fn what_cannot_be_right_is_refused_by_name() {
    let float = |offset, size: &[i64], strides: &[i64]| {
        vec![("w", tensor("FloatStorage", "0", offset, size, strides))]
    };
    let huge = i64::MAX;
    let cases = [
        (float(0, &[4, 4], &[4, 1]), vec!["`w`", "64 bytes", "48 bytes"]),
        (float(1, &[12], &[1]), vec!["`w`", "52 bytes"]),
        (float(0, &[2, 2], &[huge, 1]), vec!["`w`", "too many"]),
        (float(0, &[huge, huge], &[0, 0]), vec!["`w`", "[9223372036854775807"]),
        (float(huge, &[1], &[1]), vec!["`w`", "too many"]),
        (float(-1, &[1], &[1]), vec!["`w`", "a storage, an offset"]),
        (float(0, &[2, 2], &[1]), vec!["`w`", "2 sizes, 1 strides"]),
        (float(0, &[1, 2, 2], &[4, 1, 2]), vec!["`w`", "follow each other"]),
        (vec![("w", tensor("IntStorage", "0", 0, &[1], &[1]))], vec!["`w`", "int32"]),
        (vec![("w", tensor("CharStorage", "0", 0, &[1], &[1]))], vec!["`w`", "int8"]),
        (
            vec![("w", tensor("FloatStorage", "9", 0, &[1], &[1]))],
            vec!["`w`", "storage `9`", "none"],
        ),
        (
            vec![("w", tensor("QInt8Storage", "0", 0, &[1], &[1]))],
            vec!["torch.QInt8Storage", "not allowed"],
        ),
    ];
    let numbers = floats([0.0; 12]);
    for (entries, parts) in cases {
        let message = read(&archive(&entries, &[("data/0", &numbers)])).unwrap_err();
        assert!(parts.iter().all(|part| message.contains(part)), "{parts:?}: {message}");
    }
    let weight = float(0, &[1], &[1]);
    let big = archive(&weight, &[("data/0", &numbers), ("byteorder", b"big")]);
    let message = read(&big).unwrap_err();
    assert!(message.contains("little-endian") && message.contains("big"), "{message}");
    // Another archive, such as one of TorchScript code.
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    writer
        .start_file(
            "a/code/b.py",
            SimpleFileOptions::default().compression_method(CompressionMethod::Stored),
        )
        .unwrap();
    let message = read(&writer.finish().unwrap().into_inner()).unwrap_err();
    assert!(message.contains("data.pkl"), "{message}");
}
