use super::*;

fn allowed(module: &str, name: &str) -> bool {
    (module, name) == ("shop", "sale") || (module, name) == ("collections", "OrderedDict")
}

fn read(bytes: &[u8]) -> Result<Pickle<'_>, CheckpointError> {
    Pickle::read(Path::new("a.pth"), bytes, allowed)
}

/// The object as text: what the pickle says, without what it would do.
fn show(pickle: &Pickle, id: ObjectId) -> String {
    let list = |items: &[ObjectId]| {
        items.iter().map(|&item| show(pickle, item)).collect::<Vec<_>>().join(" ")
    };
    match pickle.get(id) {
        Object::Opaque(kind) => (*kind).to_owned(),
        Object::Bool(value) => value.to_string(),
        Object::Integer(value) => value.to_string(),
        Object::Text(text) => format!("'{text}'"),
        Object::Global { module, name } => format!("{module}.{name}"),
        Object::Tuple(items) => format!("({})", list(items)),
        Object::List(items) => format!("[{}]", list(items)),
        Object::Dict(entries) => {
            let entries: Vec<_> = entries.iter().flat_map(|&(key, value)| [key, value]).collect();
            format!("{{{}}}", list(&entries))
        }
        Object::Call { global, args } => {
            format!("{}{}", show(pickle, *global), show(pickle, *args))
        }
        Object::Persistent(id) => format!("<{}>", show(pickle, *id)),
    }
}

#[test]
fn objects_are_read_as_python_wrote_them() {
    // Made by Python's `pickle.dumps`, protocols 2, 4 and 5, but for what names the shop.
    let cases: [(&[u8], &str); 13] = [
        (b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01K\x01X\x01\x00\x00\x00bq\x02]q\x03(K\x02M,\x01eu.", "{'a' 1 'b' [2 300]}"),
        (b"\x80\x04\x95\x15\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01a\x94K\x01\x8c\x01b\x94]\x94(K\x02M,\x01eu.", "{'a' 1 'b' [2 300]}"),
        (b"\x80\x05J\xfe\xff\xff\xff.", "-2"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "119547037146038801333356"),
        (b"\x80\x02\x8a\x01\xff.", "-1"),
        (b"\x80\x02\x8a\x00.", "0"),
        (b"\x80\x02(N\x88\x89G?\xf0\x00\x00\x00\x00\x00\x00t.", "(None true false a float)"),
        (b"\x80\x02cshop\nsale\nq\x00K\x05\x85R.", "shop.sale(5)"),
        (b"\x80\x04\x8c\x04shop\x8c\x04sale\x93K\x05K\x06\x86R.", "shop.sale(5 6)"),
        (b"\x80\x02ccollections\nOrderedDict\n)R(K\x01K\x02u.", "{1 2}"),
        // Python 2's ordered dict, and texts that are bytes.
        (b"\x80\x02ccollections\nOrderedDict\n]](U\x01kU\x01vea\x85R.", "{'k' 'v'}"),
        (b"\x80\x02(U\x07storageK\x07tQ}b.", "<('storage' 7)>"),
        (b"\x80\x04\x8f(K\x01K\x02\x90C\x02ab\x86.", "([1 2] bytes)"),
    ];
    for (bytes, expected) in cases {
        let pickle = read(bytes).unwrap_or_else(|error| panic!("{expected}: {error}"));
        assert_eq!(show(&pickle, pickle.root), expected);
    }
}

#[test]
fn what_is_not_understood_is_refused_by_name() {
    let cases: [(&[u8], &[&str]); 14] = [
        (
            b"\x80\x02cos\nsystem\nX\x01\x00\x00\x00a\x85R.",
            &["os.system", "not allowed", "nothing was run"],
        ),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", &["os.system", "not allowed"]),
        (b"\x80\x02cshop\nsales\n.", &["shop.sales"]),
        (b"\x80\x01.", &["protocol 1"]),
        (b"\x80\x06.", &["protocol 6"]),
        (b"\x80\x02(i__main__\nX\n.", &["0x69"]),
        (b"\x80\x05\x97.", &["0x97"]),
        (b"\x80\x02t.", &["mark"]),
        (b"\x80\x02.", &["1 objects on the stack"]),
        // A mark protects what is below it.
        (b"\x80\x02K\x01(\x85.", &["1 objects on the stack"]),
        (b"\x80\x02h\x07.", &["remembered", "number 7"]),
        (b"\x80\x02}K\x01a.", &["a list to append to"]),
        (b"\x80\x02](K\x01u.", &["a dict"]),
        (b"\x80\x02X\xff\xff\xff\x7fabc.", &["2147483647 bytes", "truncated"]),
    ];
    for (bytes, parts) in cases {
        let message = read(bytes).map(|pickle| show(&pickle, pickle.root)).unwrap_err().to_string();
        for part in parts.iter().chain(&["a.pth", "pickle"]) {
            assert!(message.contains(part), "`{part}` is not in: {message}");
        }
    }
}

/// Each level names the one below twice: copied, sixty levels would fill any memory.
#[test]
fn an_object_that_is_named_often_is_held_once() {
    let mut bytes = b"\x80\x02)".to_vec();
    bytes.extend(b"2\x86".repeat(60));
    bytes.push(b'.');
    let pickle = read(&bytes).unwrap();
    assert_eq!((pickle.objects.len(), pickle.length), (61, bytes.len()));
    // A list in itself is read, too: nothing walks it.
    read(b"\x80\x02]q\x00h\x00a.").unwrap();
}

#[test]
fn objects_are_bounded() {
    let mut bytes = b"\x80\x02(".to_vec();
    bytes.resize(bytes.len() + MOST_OBJECTS + 1, b'N');
    let message = read(&bytes).unwrap_err().to_string();
    assert!(message.contains("at most 4194304 objects"), "{message}");
}

#[test]
fn a_pickle_cut_anywhere_is_refused() {
    let bytes = b"\x80\x04\x95\x15\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01a\x94K\x01\x8c\x01b\x94]\x94(K\x02M,\x01eu.";
    for length in 0..bytes.len() {
        assert!(read(&bytes[..length]).is_err(), "{length}");
    }
}
