use std::{collections::HashMap, fs};

use crate::{
    Checkpoint, CheckpointError, DType, Format, RopeScaling, TensorSpec,
    checkpoint::tests::whole,
    fixtures::{fixture, own_fixture},
    gguf_metadata::Value,
    manifest,
};

#[derive(serde::Deserialize)]
struct Block {
    dtype: String,
    block: String,
    values: String,
}

fn bytes_of(hex: &str) -> Vec<u8> {
    let digit = |i: usize| u8::from_str_radix(&hex[i..i + 2], 16).unwrap();
    (0..hex.len()).step_by(2).map(digit).collect()
}

#[test]
fn every_block_type_is_decoded_to_the_bit() {
    let text = fs::read_to_string(own_fixture("blocks.json")).unwrap();
    let blocks: Vec<Block> = serde_json::from_str(&text).unwrap();
    let quantised = DType::ALL.iter().filter(|dtype| dtype.block_len() > 1);
    assert_eq!(blocks.len(), quantised.count());
    for Block { dtype: name, block, values } in blocks {
        let dtype = DType::ALL.into_iter().find(|dtype| dtype.name() == name).unwrap();
        let (block, expected) = (bytes_of(&block), bytes_of(&values));
        // Twice in a row, so that a wrong stride shows.
        let mut values = vec![0f32; 2 * dtype.block_len()];
        dtype.dequantise(&[block.clone(), block].concat(), &mut values);
        let found: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        assert_eq!(found, [expected.clone(), expected].concat(), "{name}");
    }
}

/// A file may align its tensors to one byte.
#[test]
fn blocks_are_decoded_at_any_address() {
    let text = fs::read_to_string(own_fixture("blocks.json")).unwrap();
    let blocks: Vec<Block> = serde_json::from_str(&text).unwrap();
    for Block { dtype: name, block, values } in blocks {
        let dtype = DType::ALL.into_iter().find(|dtype| dtype.name() == name).unwrap();
        let (block, expected) = (bytes_of(&block), bytes_of(&values));
        for before in 0..4 {
            let bytes = [&vec![0; before], block.as_slice()].concat();
            let mut values = vec![0f32; dtype.block_len()];
            dtype.dequantise(&bytes[before..], &mut values);
            let found: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            assert_eq!(found, expected, "{name} at {before}");
        }
    }
}

/// CRC-32 (ISO 3309), as zlib computes it.
fn crc32(values: &[f32]) -> u32 {
    let mut table = [0u32; 256];
    for (entry, i) in table.iter_mut().zip(0u32..) {
        *entry = (0..8).fold(i, |c, _| if c & 1 == 1 { 0xEDB8_8320 ^ (c >> 1) } else { c >> 1 });
    }
    let bytes = values.iter().flat_map(|value| value.to_le_bytes());
    !bytes.fold(!0u32, |crc, byte| table[((crc ^ u32::from(byte)) & 255) as usize] ^ (crc >> 8))
}

/// Every tensor has the values that gguf-py reads from the same file.
fn check_values(checkpoint: &Checkpoint, name: &str) {
    let text = fs::read_to_string(own_fixture("gguf_values.json")).unwrap();
    let all: HashMap<String, HashMap<String, u32>> = serde_json::from_str(&text).unwrap();
    let sums = &all[name];
    let tensors = manifest::tensors(checkpoint.model());
    assert_eq!(tensors.len(), sums.len());
    for TensorSpec { name: tensor, .. } in tensors {
        assert_eq!(crc32(&whole(checkpoint, &tensor)), sums[&tensor], "{name}: {tensor}");
    }
}

#[test]
fn quantised_files_have_the_reference_values() {
    for name in ["gguf-mixed", "gguf-q8_0", "gguf-q4_0", "gguf-q4_k_m"] {
        let checkpoint = Checkpoint::open(&fixture(&format!("formats/{name}"))).unwrap();
        assert_eq!(checkpoint.format(), Format::Gguf);
        check_values(&checkpoint, name);
    }
}

/// The real model, where its file is at hand: `TRIREME_SMOLLM2=path/to/the.gguf`.
#[test]
fn smollm2_has_the_reference_values_and_ids() {
    let Some(path) = std::env::var_os("TRIREME_SMOLLM2") else { return };
    let checkpoint = Checkpoint::open(path.as_ref()).unwrap();
    check_values(&checkpoint, "smollm2");
    assert_eq!(*checkpoint.model(), crate::config::tests::model());
    crate::text::tests::check_cases(&checkpoint.text().unwrap(), "smollm2");
}

#[test]
fn a_gguf_file_is_the_same_model_as_its_source() {
    for (file, source) in [
        ("gguf-f32", "llama3-like"),
        ("gguf-f16", "llama3-like"),
        ("gguf-f16-smollm", "smollm-like"),
    ] {
        let open = |name: &str| Checkpoint::open(&fixture(name)).unwrap();
        let (gguf, hf) = (open(&format!("formats/{file}")), open(&format!("models/{source}")));
        for TensorSpec { name: tensor, .. } in manifest::tensors(hf.model()) {
            assert_eq!(whole(&gguf, &tensor), whole(&hf, &tensor), "{tensor} of {file}");
        }
        // llama.cpp stores the scaled frequencies themselves, in f32.
        let frequencies = gguf.model().rotation(512).inverse_frequencies;
        let pairs = frequencies.iter().zip(hf.model().rotation(512).inverse_frequencies);
        for (found, expected) in pairs {
            assert!((found / expected - 1.0).abs() < 1e-6, "{file}: {found} is not {expected}");
        }
        let mut model = gguf.model().clone();
        let divisors = matches!(model.rope_scaling, RopeScaling::PerFrequency { .. });
        assert_eq!(divisors, source == "llama3-like");
        model.rope_scaling = hf.model().rope_scaling.clone();
        assert_eq!(model, *hf.model(), "{file}");
    }
}

/// A GGUF file in the making.
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub(crate) fn new(tensors: u64, keys: u64) -> Self {
        let mut writer = Self(b"GGUF".to_vec());
        writer.0.extend(3u32.to_le_bytes());
        writer.0.extend(tensors.to_le_bytes());
        writer.0.extend(keys.to_le_bytes());
        writer
    }

    fn string(mut self, text: &str) -> Self {
        self.0.extend((text.len() as u64).to_le_bytes());
        self.0.extend(text.as_bytes());
        self
    }

    fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    /// A key with a value of the type that models use.
    pub(crate) fn key(self, key: &str, value: &Value) -> Self {
        match value {
            Value::Text(text) => self.text_key(key, text),
            Value::Integer(value) => self.string(key).u32(4).u32(*value as u32),
            Value::Float(value) => self.string(key).u32(6).u32((*value as f32).to_bits()),
            Value::Integers(list) => {
                let list_key = self.string(key).u32(9).u32(4).u64(list.len() as u64);
                list.iter().fold(list_key, |writer, &value| writer.u32(value as u32))
            }
            other => panic!("no model key has {other:?}"),
        }
    }

    fn text_key(self, key: &str, value: &str) -> Self {
        self.string(key).u32(8).string(value)
    }

    fn tensor(self, name: &str, shape: [u64; 2], kind: u32, offset: u64) -> Self {
        self.string(name).u32(2).u64(shape[0]).u64(shape[1]).u32(kind).u64(offset)
    }

    pub(crate) fn open(self, padding: usize) -> Result<Checkpoint, CheckpointError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        fs::write(&path, [self.0, vec![0; padding]].concat()).unwrap();
        Checkpoint::open(&path)
    }
}

#[test]
fn hostile_headers_are_refused() {
    let huge = 1u64 << 50;
    let new = Writer::new;
    for (writer, parts) in [
        (new(0, huge), ["number of metadata keys", "1125899906842624"]),
        (new(0, 1).u64(huge), ["metadata key", "1125899906842624 bytes"]),
        (new(0, 1).string("k").u32(8).u64(huge), ["k", "1125899906842624 bytes"]),
        (new(0, 1).string("k").u32(9).u32(8).u64(huge), ["k", "1125899906842624"]),
        (new(0, 1).string("k").u32(9).u32(0).u64(huge), ["k", "1125899906842624"]),
        (new(0, 1).string("k").u32(9).u32(9).u64(1).u64(0), ["k", "list of lists"]),
        (new(0, 1).string("k").u32(13), ["k", "type 13"]),
        (new(0, 1).string("k").u32(9).u32(99).u64(1).u64(0), ["k", "type 99"]),
        (new(0, 2).text_key("k", "").text_key("k", ""), ["k", "twice"]),
        (new(0, 1).text_key("general.alignment", "x"), ["general.alignment", "\"x\""]),
        (new(0, 1).string("general.alignment").u32(4).u32(48), ["general.alignment", "48"]),
        (new(0, 1).string("general.alignment").u32(4).u32(0), ["general.alignment", "found 0"]),
        (new(0, 1).text_key("general.architecture", "mamba"), ["general.architecture", "mamba"]),
        (new(1, 0).tensor("w", [32, 1], 16, 0), ["`w`", "ggml type 16"]),
        (new(1, 0).tensor("w", [31, 32], 2, 0), ["`w`", "[32, 31]"]),
        (new(1, 0).tensor("w", [huge, huge], 0, 0), ["`w`", "1125899906842624"]),
        (new(1, 0).tensor("w", [32, 1], 0, huge), ["`w`", "within the file"]),
        (new(1, 0).tensor("w", [32, 1], 0, 16), ["`w`", "multiple of 32"]),
        (new(1, 0).string("w").u32(5).u64(1).u64(1).u64(1), ["`w`", "1 to 4 dimensions"]),
        (new(2, 0).tensor("w", [8, 1], 0, 0).tensor("w", [8, 1], 0, 32), ["`w`", "twice"]),
        (new(2, 0).tensor("v", [16, 1], 0, 0).tensor("w", [8, 1], 0, 32), ["`w`", "`v`"]),
    ] {
        // Enough behind the header that what is read is there.
        let message = writer.open(200).map(|_| ()).expect_err(parts[0]).to_string();
        assert!(parts.iter().all(|part| message.contains(part)), "{parts:?}: {message}");
        assert!(message.contains("model.gguf"), "{message}");
    }
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let source = fixture("formats/gguf-f16/llama3-like.F16.gguf");
    let bytes = fs::read(source).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cut.gguf");
    // Every length within the first keys, then in wider and wider steps through lists and data.
    let lengths = (1..600).chain((600..bytes.len()).step_by(9973)).chain([bytes.len() - 1]);
    for length in lengths {
        fs::write(&path, &bytes[..length]).unwrap();
        let message = Checkpoint::open(&path).map(|_| ()).expect_err("cut").to_string();
        assert!(message.contains("cut.gguf"), "{length}: {message}");
    }
}
