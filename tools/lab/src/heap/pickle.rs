//! A reader of Python pickles with plain data: dictionaries, lists, tuples, numbers, text.
//!
//! A pickle is a program for a stack machine, which can also name Python functions and call them.
//! This reader refuses those. It uses no recursion, and memory in proportion to the file up to
//! fixed limits. Values that occur several times are kept once. Of dictionaries it keeps only the
//! wanted keys.

use std::cell::Cell;
use std::collections::HashMap;

use serde::de::value::{Error, MapDeserializer, SeqDeserializer};
use serde::de::{DeserializeOwned, Deserializer, Error as _, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;

/// The first byte of a pickle of protocol 2 to 5.
pub(super) const FIRST: u8 = 0x80;

/// The most values on the stack, containers, and numbered values.
const MOST: usize = 1 << 23;
/// The most elements of all containers together, and the most that are read from them.
const MOST_ELEMENTS: usize = 1 << 25;

#[derive(Clone, Copy, Debug)]
enum Value {
    None,
    Bool(bool),
    Int(i64),
    /// A range of the file that is UTF-8.
    Text(u32, u32),
    /// A number or bytes that nothing here needs.
    Other,
    List(u32),
    Dict(u32),
}

/// The values of a pickle. A dictionary is a list of alternating keys and values.
struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    wanted: &'a [&'a str],
    stack: Vec<Value>,
    marks: Vec<usize>,
    memo: HashMap<u32, Value>,
    containers: Vec<Vec<Value>>,
    elements: usize,
}

/// Reads a pickle of a value of type `T`. Of dictionaries only the keys in `wanted` are kept.
///
/// # Errors
/// The pickle is wrong; the error names the byte.
pub(super) fn read<T: DeserializeOwned>(bytes: &[u8], wanted: &[&str]) -> Result<T, String> {
    let mut machine = Machine {
        bytes,
        at: 0,
        wanted,
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
        containers: Vec::new(),
        elements: 0,
    };
    let value = loop {
        let at = machine.at;
        match machine.step() {
            Ok(None) => {}
            Ok(Some(value)) => break value,
            Err(what) => return Err(format!("byte {at} of the pickle: {what}")),
        }
    };
    let read = Cell::new(0);
    let root = Reader {
        machine: &machine,
        value,
        read: &read,
    };
    T::deserialize(root).map_err(|error| error.to_string())
}

impl Machine<'_> {
    /// Executes one instruction. Returns the value at the last instruction.
    fn step(&mut self) -> Result<Option<Value>, String> {
        let [code] = self.take()?;
        match code {
            FIRST => {
                let [version] = self.take()?;
                if !(2..=5).contains(&version) {
                    return Err(format!("protocol {version} is not read, only 2 to 5"));
                }
            }
            0x95 => drop(self.take::<8>()?),
            b'.' => return self.pop().map(Some),
            b'0' => drop(self.pop()?),
            b'(' => {
                self.marks.push(self.stack.len());
                self.enough(self.marks.len(), MOST)?;
            }
            b'N' => self.push(Value::None)?,
            0x88 | 0x89 => self.push(Value::Bool(code == 0x88))?,
            b'q' | b'r' | 0x94 | b'h' | b'j' => self.memory(code)?,
            b'}' | b']' | b')' | b't' | 0x85..=0x87 | b'a' | b'e' | b's' | b'u' => {
                self.container(code)?;
            }
            b'K' | b'M' | b'J' | 0x8a | 0x8b | b'G' => self.number(code)?,
            0x8c | b'X' | 0x8d | b'C' | b'B' | 0x8e => self.string(code)?,
            b'c' | 0x93 | b'R' | b'b' | b'i' | b'o' | 0x81 | 0x92 | b'P' | b'Q' | 0x82..=0x84 => {
                return Err("it makes Python objects, and only plain data is read".to_owned());
            }
            code => return Err(format!("instruction 0x{code:02x} is not read")),
        }
        Ok(None)
    }

    /// Numbers the value on the stack, or pushes the value of a number.
    fn memory(&mut self, code: u8) -> Result<(), String> {
        let number = match code {
            b'q' | b'h' => u32::from(u8::from_le_bytes(self.take()?)),
            b'r' | b'j' => u32::from_le_bytes(self.take()?),
            _ => self.memo.len() as u32,
        };
        if matches!(code, b'h' | b'j') {
            let value = self.memo.get(&number).copied();
            return self.push(value.ok_or_else(|| format!("there is no value {number}"))?);
        }
        let value = self.pop()?;
        self.stack.push(value);
        self.memo.insert(number, value);
        self.enough(self.memo.len(), MOST)
    }

    fn container(&mut self, code: u8) -> Result<(), String> {
        let count = match code {
            b'}' | b']' | b')' => 0,
            0x85..=0x87 => usize::from(code - 0x84),
            b'a' => 1,
            b's' => 2,
            _ => {
                let mark = self.marks.pop().ok_or("there is no mark")?;
                self.stack.len().checked_sub(mark).ok_or(SHORT)?
            }
        };
        let from = self.stack.len().checked_sub(count).ok_or(SHORT)?;
        if self.marks.last().is_some_and(|&mark| mark > from) {
            return Err(SHORT.to_owned());
        }
        let values = self.stack.split_off(from);
        match code {
            b'a' | b'e' => match self.stack.last() {
                Some(&Value::List(list)) => self.extend(list, &values),
                _ => Err("there is no list".to_owned()),
            },
            b's' | b'u' => match self.stack.last() {
                Some(&Value::Dict(dict)) => {
                    for pair in values.chunks(2) {
                        if self.is_wanted(pair[0]) {
                            self.extend(dict, pair)?;
                        }
                    }
                    Ok(())
                }
                _ => Err("there is no dictionary".to_owned()),
            },
            _ => {
                let index = self.containers.len();
                self.containers.push(Vec::new());
                self.enough(index, MOST)?;
                self.extend(index as u32, &values)?;
                self.push(match code {
                    b'}' => Value::Dict(index as u32),
                    _ => Value::List(index as u32),
                })
            }
        }
    }

    fn extend(&mut self, container: u32, values: &[Value]) -> Result<(), String> {
        self.elements += values.len();
        self.enough(self.elements, MOST_ELEMENTS)?;
        self.containers[container as usize].extend_from_slice(values);
        Ok(())
    }

    fn is_wanted(&self, key: Value) -> bool {
        self.text(key).is_some_and(|key| self.wanted.contains(&key))
    }

    fn text(&self, value: Value) -> Option<&str> {
        match value {
            Value::Text(start, end) => {
                let text = self.bytes.get(start as usize..end as usize)?;
                std::str::from_utf8(text).ok()
            }
            _ => None,
        }
    }

    fn number(&mut self, code: u8) -> Result<(), String> {
        let value = match code {
            b'K' => Value::Int(u8::from_le_bytes(self.take()?).into()),
            b'M' => Value::Int(u16::from_le_bytes(self.take()?).into()),
            b'J' => Value::Int(i32::from_le_bytes(self.take()?).into()),
            b'G' => {
                self.take::<8>()?;
                Value::Other
            }
            _ => {
                let length = match code {
                    0x8a => u8::from_le_bytes(self.take()?).into(),
                    _ => u32::from_le_bytes(self.take()?),
                };
                let bytes = self.skip(length.into())?;
                match bytes.last() {
                    None => Value::Int(0),
                    Some(last) if bytes.len() <= 8 => {
                        let sign = if *last < 0x80 { 0 } else { 0xff };
                        let mut number = [sign; 8];
                        number[..bytes.len()].copy_from_slice(bytes);
                        Value::Int(i64::from_le_bytes(number))
                    }
                    Some(_) => Value::Other,
                }
            }
        };
        self.push(value)
    }

    fn string(&mut self, code: u8) -> Result<(), String> {
        let length = match code {
            0x8c | b'C' => u8::from_le_bytes(self.take()?).into(),
            b'X' | b'B' => u32::from_le_bytes(self.take()?).into(),
            _ => u64::from_le_bytes(self.take()?),
        };
        let start = self.at;
        self.skip(length)?;
        let range = (u32::try_from(start), u32::try_from(self.at));
        self.push(match (code, range) {
            (0x8c | b'X' | 0x8d, (Ok(start), Ok(end))) => Value::Text(start, end),
            _ => Value::Other,
        })
    }

    fn push(&mut self, value: Value) -> Result<(), String> {
        self.stack.push(value);
        self.enough(self.stack.len(), MOST)
    }

    fn pop(&mut self) -> Result<Value, String> {
        let least = self.marks.last().copied().unwrap_or_default();
        match self.stack.len() > least {
            true => self.stack.pop().ok_or_else(|| SHORT.to_owned()),
            false => Err(SHORT.to_owned()),
        }
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let taken = self.skip(N as u64)?;
        taken.try_into().map_err(|_| ENDS.to_owned())
    }

    fn skip(&mut self, length: u64) -> Result<&[u8], String> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let length = usize::try_from(length).map_err(|_| ENDS)?;
        let taken = rest.get(..length).ok_or(ENDS)?;
        self.at += length;
        Ok(taken)
    }

    fn enough(&self, count: usize, most: usize) -> Result<(), String> {
        match count <= most {
            true => Ok(()),
            false => Err(format!(
                "it has more than {most} values, the most that are read"
            )),
        }
    }
}

const ENDS: &str = "the file ends too early";
const SHORT: &str = "a value is missing";

#[derive(Clone, Copy)]
struct Reader<'a> {
    machine: &'a Machine<'a>,
    value: Value,
    /// The number of elements read. A list can be in another one many times.
    read: &'a Cell<usize>,
}

impl<'a> Reader<'a> {
    fn elements(self, container: u32) -> Result<impl Iterator<Item = Self>, Error> {
        let container = self.machine.containers.get(container as usize);
        let values: &[Value] = container.map_or(&[], |values| values);
        self.read.set(self.read.get() + values.len());
        if self.read.get() > MOST_ELEMENTS {
            return Err(Error::custom(format!(
                "it has more than {MOST_ELEMENTS} values, the most that are read"
            )));
        }
        Ok(values.iter().map(move |&value| Self { value, ..self }))
    }
}

impl<'de> Deserializer<'de> for Reader<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.value {
            Value::None | Value::Other => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(value),
            Value::Int(value) => visitor.visit_i64(value),
            Value::Text(..) => match self.machine.text(self.value) {
                Some(text) => visitor.visit_str(text),
                None => Err(Error::custom("a text is not UTF-8")),
            },
            Value::List(list) => visitor.visit_seq(SeqDeserializer::new(self.elements(list)?)),
            Value::Dict(dict) => {
                let mut elements = self.elements(dict)?;
                let pairs = std::iter::from_fn(|| elements.next().zip(elements.next()));
                visitor.visit_map(MapDeserializer::new(pairs))
            }
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.value {
            Value::None => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_unit()
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct newtype_struct seq tuple tuple_struct map struct enum identifier
    }
}

impl<'de> IntoDeserializer<'de, Error> for Reader<'_> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Default, Deserialize, PartialEq)]
    #[serde(default)]
    struct Seen {
        a: i64,
        b: Option<Vec<Vec<i64>>>,
        c: String,
    }

    const WANTED: &[&str] = &["a", "b", "c"];

    /// `{"a": -5, "b": [(1, 70000), [2**40]], "d": [None, 1.5, b"x"], "c": "a"}`, protocol 4.
    const PLAIN: &[u8] =
        b"\x80\x04\x95\x4e\0\0\0\0\0\0\0}\x94(\x8c\x01a\x94J\xfb\xff\xff\xff\x8c\x01b\
        \x94]\x94(K\x01J\x70\x11\x01\0\x86\x94]\x94\x8a\x06\0\0\0\0\0\x01ae\x8c\x01d\x94]\x94(N\
        G\x3f\xf8\0\0\0\0\0\0C\x01x\x94e\x8c\x01c\x94h\x01u.";

    fn error(bytes: &[u8]) -> String {
        read::<Seen>(bytes, WANTED).unwrap_err()
    }

    #[test]
    fn plain_data_is_read() {
        let seen: Seen = read(PLAIN, WANTED).unwrap();
        assert_eq!(seen.a, -5);
        assert_eq!(seen.b, Some(vec![vec![1, 70_000], vec![1 << 40]]));
        assert_eq!(seen.c, "a");
    }

    #[test]
    fn calls_of_python_are_refused() {
        for bytes in [
            &b"\x80\x02cos\nsystem\nX\x02\0\0\0ls\x85R."[..],
            b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02ls\x85R.",
        ] {
            assert!(error(bytes).contains("only plain data"), "{}", error(bytes));
        }
    }

    #[test]
    fn what_is_no_pickle_is_named_with_its_byte() {
        for (bytes, what) in [
            (&b"\x80"[..], "ends too early"),
            (b"\x80\x07.", "protocol 7"),
            (b"\x80\x04.", "byte 2 of the pickle: a value is missing"),
            (b"\x80\x04}u.", "there is no mark"),
            (b"\x80\x04K\x01(00.", "a value is missing"),
            (b"\x80\x04K\x01K\x02a.", "there is no list"),
            (b"\x80\x04](K\x01u.", "there is no dictionary"),
            (b"\x80\x04h\x09.", "there is no value 9"),
            (
                b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\xff.",
                "ends too early",
            ),
            (b"\x80\x04~.", "instruction 0x7e"),
            (b"\x80\x04K\x01.", "invalid type"),
        ] {
            assert!(error(bytes).contains(what), "{bytes:?}: {}", error(bytes));
        }
    }

    #[test]
    #[ignore = "slow: `.ci/run` runs it"]
    fn lists_in_themselves_and_deep_and_wide_ones_end() {
        // A list that contains itself, where lists of numbers are expected.
        assert!(error(b"\x80\x04}\x8c\x01b]\x94h\0as.").contains("invalid type"));
        // A million lists, each in the next: deeper than a stack could hold.
        let mut deep = b"\x80\x04}\x8c\x01b".to_vec();
        deep.resize(deep.len() + 1_000_000, b']');
        deep.resize(deep.len() + 999_999, b'a');
        deep.extend(b"s.");
        assert!(error(&deep).contains("invalid type"));
        // A list of 100,000 numbers, 100,000 times.
        let mut wide = b"\x80\x04}\x8c\x01b](](".to_vec();
        (0..100_000).for_each(|_| wide.extend(b"K\x01"));
        wide.extend(b"e\x94");
        (0..100_000).for_each(|_| wide.extend(b"h\0"));
        wide.extend(b"es.");
        assert!(error(&wide).contains("the most that are read"));
        let mut marks = b"\x80\x04".to_vec();
        marks.resize(MOST + 10, b'(');
        assert!(error(&marks).contains("the most that are read"));
    }

    proptest! {
        #[test]
        fn changed_bytes_do_no_harm(
            changes in prop::collection::vec((0..PLAIN.len(), any::<u8>()), 0..4),
            end in 0..=PLAIN.len(),
        ) {
            let mut bytes = PLAIN.to_vec();
            for (at, byte) in changes {
                bytes[at] = byte;
            }
            bytes.truncate(end);
            if let Err(error) = read::<Seen>(&bytes, WANTED) {
                prop_assert!(!error.is_empty());
            }
        }
    }
}
