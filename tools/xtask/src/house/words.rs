//! Words in attributes and other tokens, and their meaning for an item.

use proc_macro2::{TokenStream, TokenTree};
use syn::{Attribute, Meta};

/// Returns `true` if an item with these attributes is compiled for tests only.
pub(crate) fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("test")
            || (attribute.path().is_ident("cfg") && {
                let words = words_of_attribute(attribute);
                let says = |wanted: &str| words.iter().any(|word| word == wanted);
                says("test") && !says("not") && !says("any")
            })
    })
}

pub(crate) fn words_of_attribute(attribute: &Attribute) -> Vec<String> {
    let mut words = Vec::new();
    if let Meta::List(list) = &attribute.meta {
        collect_words(list.tokens.clone(), &mut words);
    }
    words
}

pub(crate) fn collect_words(tokens: TokenStream, words: &mut Vec<String>) {
    for token in tokens {
        match token {
            TokenTree::Group(group) => collect_words(group.stream(), words),
            TokenTree::Ident(ident) => words.push(ident.to_string()),
            TokenTree::Literal(literal) => {
                words.push(literal.to_string().trim_matches('"').to_owned());
            }
            TokenTree::Punct(_) => {}
        }
    }
}
