//! Formatting of the elements of a tensor.

use std::fmt::Display;

use half::{bf16, f16};

/// Returns the size of an element in bytes. Elements of unknown types are shown byte by byte.
pub(super) fn width(dtype: &str) -> u64 {
    match dtype {
        "F64" | "I64" | "U64" => 8,
        "F32" | "I32" | "U32" => 4,
        "F16" | "BF16" | "I16" | "U16" => 2,
        _ => 1,
    }
}

pub(super) fn shown(dtype: &str, bytes: &[u8]) -> Vec<String> {
    match dtype {
        "F64" => each(bytes, f64::from_le_bytes),
        "F32" => each(bytes, f32::from_le_bytes),
        "F16" => each(bytes, f16::from_le_bytes),
        "BF16" => each(bytes, bf16::from_le_bytes),
        "I64" => each(bytes, i64::from_le_bytes),
        "I32" => each(bytes, i32::from_le_bytes),
        "I16" => each(bytes, i16::from_le_bytes),
        "I8" => each(bytes, i8::from_le_bytes),
        "U64" => each(bytes, u64::from_le_bytes),
        "U32" => each(bytes, u32::from_le_bytes),
        "U16" => each(bytes, u16::from_le_bytes),
        "U8" => each(bytes, u8::from_le_bytes),
        "BOOL" => each(bytes, |[byte]| byte != 0),
        _ => each(bytes, |[byte]| format!("{byte:#04x}")),
    }
}

fn each<const WIDTH: usize, T: Display>(
    bytes: &[u8],
    read: impl Fn([u8; WIDTH]) -> T,
) -> Vec<String> {
    let (whole, _) = bytes.as_chunks::<WIDTH>();
    whole.iter().map(|&one| read(one).to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::{shown, width};

    #[test]
    fn elements_are_what_their_bits_say() {
        for (dtype, bytes, expected) in [
            ("F64", &1.5f64.to_le_bytes()[..], "1.5"),
            ("F32", &(-0.25f32).to_le_bytes(), "-0.25"),
            ("F16", &[0x00, 0x3e], "1.5"),
            ("BF16", &[0xc0, 0x3f], "1.5"),
            ("I16", &(-2i16).to_le_bytes(), "-2"),
            ("U64", &u64::MAX.to_le_bytes(), "18446744073709551615"),
            ("BOOL", &[1], "true"),
            ("F8_E4M3", &[0x38], "0x38"),
        ] {
            assert_eq!(width(dtype), bytes.len() as u64, "{dtype}");
            assert_eq!(shown(dtype, bytes), [expected], "{dtype}");
        }
        assert_eq!(shown("U16", &[1, 0, 2]), ["1"], "half an element is none");
    }
}
