//! Diagnosis, which a GPU does not give: leaks, memory taken from queued work, use of released
//! handles, and reads of memory that was never written.
//!
//! The driver's own tables know which objects are live. This module only remembers where they were
//! made and released, so a correct program gets no finding, whatever this module forgets. A setting
//! or `fakecuda_watch` turns it on; while off, a call costs one look at a flag.
//!
//! | module | what it holds |
//! |---|---|
//! | `python` | the lines of a Python program |
//! | `site` | a place in the program |
//!  `books` | sites of live and of recently released objects |
//! | `keepers` | libraries that keep memory for their users until the process ends |
//!  `findings` | the findings, each once with the number of times |
//! | `report` | the text and the JSON |

pub(crate) mod books;
pub(crate) mod findings;
pub(crate) mod keepers;
mod python;
pub(crate) mod report;
pub(crate) mod site;
