//! Sizes as they stand on the command line.

use bytesize::ByteSize;

/// Reads a size of at least a byte.
///
/// # Errors
/// What a size looks like.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    match text.parse::<ByteSize>() {
        Ok(ByteSize(0)) => Err("a size is at least one byte".to_owned()),
        Ok(ByteSize(bytes)) => Ok(bytes),
        Err(_) => Err("a size is a number of bytes, or like 512MiB or 8GiB".to_owned()),
    }
}
