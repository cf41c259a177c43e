//! Words in attributes, paths and the tokens of macros, and their meaning for an item.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
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

/// Returns the attributes of an item of a kind that can be for tests only.
pub(crate) fn attributes(item: &syn::Item) -> &[Attribute] {
    match item {
        syn::Item::Const(item) => &item.attrs,
        syn::Item::Enum(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Macro(item) => &item.attrs,
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Static(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Trait(item) => &item.attrs,
        syn::Item::Type(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

pub(crate) fn parts(path: &syn::Path) -> Vec<String> {
    let segments = path.segments.iter();
    segments.map(|segment| segment.ident.to_string()).collect()
}

/// Returns a path that starts with `crate`, `self` or `super` as one from the crate's root. `here` is
/// the path of the module that names it.
pub(crate) fn from_root(here: &[String], path: &[String]) -> Option<Vec<String>> {
    let mut base = match path.first().map(String::as_str) {
        Some("crate") => Vec::new(),
        Some("self" | "super") => here.to_vec(),
        _ => return None,
    };
    for part in path {
        match &**part {
            "crate" | "self" => {}
            "super" => drop(base.pop()),
            _ => base.push(part.clone()),
        }
    }
    Some(base)
}

/// The tokens of a macro, whose calls and paths are recognized by their form.
pub(crate) struct Tokens(pub(crate) Vec<TokenTree>);

impl Tokens {
    pub(crate) fn is(&self, at: usize, wanted: char) -> bool {
        matches!(self.0.get(at), Some(TokenTree::Punct(punct)) if punct.as_char() == wanted)
    }

    pub(crate) fn is_word(&self, at: usize, wanted: &str) -> bool {
        matches!(self.0.get(at), Some(TokenTree::Ident(ident)) if ident == wanted)
    }

    /// Returns `true` if arguments, or type parameters before them, start here.
    pub(crate) fn is_call(&self, at: usize) -> bool {
        self.is(at, ':') || self.is_arguments(at)
    }

    pub(crate) fn is_arguments(&self, at: usize) -> bool {
        matches!(self.0.get(at), Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Parenthesis)
    }

    /// Returns `true` if the method here is called on `self` and not on a field.
    pub(crate) fn is_own(&self, at: usize) -> bool {
        let behind = |back: usize| at.checked_sub(back);
        behind(2).is_some_and(|at| self.is_word(at, "self"))
            && !behind(3).is_some_and(|at| self.is(at, '.'))
    }

    /// Returns the parts of the path that starts here.
    pub(crate) fn path(&self, mut at: usize) -> Vec<String> {
        let mut parts = Vec::new();
        while let Some(TokenTree::Ident(ident)) = self.0.get(at) {
            parts.push(ident.to_string());
            if !(self.is(at + 1, ':') && self.is(at + 2, ':')) {
                break;
            }
            at += 3;
        }
        parts
    }
}
