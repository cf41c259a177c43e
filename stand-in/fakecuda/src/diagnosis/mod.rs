//! Diagnosis, which a GPU does not give: leaks, memory taken from queued work, released handles that
//! are used, and memory that is read and was never written.
//!
//! The driver's own tables say which objects are live. This module only remembers where they were
//! made and released, so a program that does nothing wrong gets no finding, whatever this module
//! forgets. It is off until a setting or `fakecuda_watch` turns it on, and a call then costs one
//! look at a flag.
//!
//! | module | what it holds |
//! |---|---|
//! | `python` | the lines of a Python program |
//! | `site` | a place in the program |
//! | `books` | the sites of objects that live, and of the last ones that were released |
//! | `keepers` | libraries that keep memory for their users until the process ends |
//! | `findings` | what was found, each once with the number of times |
//! | `report` | the text and the JSON |

pub(crate) mod books;
pub(crate) mod findings;
pub(crate) mod keepers;
mod python;
pub(crate) mod report;
pub(crate) mod site;
