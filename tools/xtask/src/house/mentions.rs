//! Items that a file mentions: paths, calls, macros, statics, attributes. This module only collects
//! them.
//!
//! Paths are read from the syntax tree wherever they occur, in `use`, types, patterns and
//! expressions. The contents of a macro are only tokens, so paths and calls in them are recognized
//! by their form.

use proc_macro2::{Span, TokenStream, TokenTree};
use syn::spanned::Spanned as _;
use syn::visit::{self, Visit};
use syn::{Attribute, UseTree};

use super::tree::Module;
use super::words::{
    Tokens, attributes, collect_words, from_root, is_for_tests, parts, words_of_attribute,
};

#[derive(Clone, Debug)]
pub(crate) struct Mention {
    pub(crate) line: usize,
    /// `true` if it is compiled for tests only.
    pub(crate) test: bool,
    /// `true` if the compiler evaluates it. An assert there checks the program and not a caller.
    pub(crate) constant: bool,
    pub(crate) what: What,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// A path that starts at the crate's root, without the word `crate`; `super` and `self` are
    /// resolved. Ends in `*` for a glob.
    Inside {
        path: Vec<String>,
        /// The name under which a `use` imports it.
        name: Option<String>,
    },
    /// Any other path of at least two parts, or a `use` of one.
    Outside(Vec<String>),
    /// A method or function that is called or referred to, by the last part of its path.
    Call(String),
    Macro(String),
    Function(String),
    Static {
        name: String,
        /// The words of its type, and `mut` for a `static mut`.
        words: Vec<String>,
    },
    Cfg(Vec<String>),
    /// `allow(unsafe_code)`.
    AllowsUnsafe,
}

pub(crate) fn mentions(module: &Module) -> Vec<Mention> {
    let mut reader = Reader {
        path: module.path.clone(),
        test: module.test,
        constant: false,
        found: Vec::new(),
    };
    reader.visit_file(&module.syntax);
    reader.found
}

/// Returns the paths that a `use` imports as they are written, each with the name that it gets
/// here.
pub(crate) fn imports(item: &syn::ItemUse) -> Vec<(Vec<String>, String)> {
    fn walk(tree: &UseTree, before: &[String], found: &mut Vec<(Vec<String>, String)>) {
        let with = |name: String| {
            let mut path = before.to_vec();
            if name != "self" || before.is_empty() {
                path.push(name);
            }
            path
        };
        match tree {
            UseTree::Path(path) => walk(&path.tree, &with(path.ident.to_string()), found),
            UseTree::Group(group) => group
                .items
                .iter()
                .for_each(|tree| walk(tree, before, found)),
            UseTree::Name(name) => {
                let path = with(name.ident.to_string());
                let name = path.last().cloned().unwrap_or_default();
                found.push((path, name));
            }
            UseTree::Rename(rename) => {
                found.push((with(rename.ident.to_string()), rename.rename.to_string()));
            }
            UseTree::Glob(_) => found.push((with("*".to_owned()), "*".to_owned())),
        }
    }
    let mut found = Vec::new();
    walk(&item.tree, &[], &mut found);
    found
}

struct Reader {
    path: Vec<String>,
    test: bool,
    constant: bool,
    found: Vec<Mention>,
}

impl Reader {
    fn say(&mut self, span: Span, what: What) {
        self.found.push(Mention {
            line: span.start().line,
            test: self.test,
            constant: self.constant,
            what,
        });
    }

    fn say_path(&mut self, span: Span, parts: Vec<String>, name: Option<String>) {
        if let Some(path) = from_root(&self.path, &parts) {
            self.say(span, What::Inside { path, name });
        } else if parts.len() > 1 || name.is_some() {
            self.say(span, What::Outside(parts));
        }
    }

    fn say_tokens(&mut self, tokens: TokenStream) {
        let tokens = Tokens(tokens.into_iter().collect());
        let mut at = 0;
        while let Some(token) = tokens.0.get(at) {
            match token {
                TokenTree::Group(group) => self.say_tokens(group.stream()),
                TokenTree::Ident(ident) => {
                    let span = ident.span();
                    let after_dot = at > 0 && tokens.is(at - 1, '.');
                    let parts = tokens.path(at);
                    at += 3 * (parts.len() - 1);
                    let last = parts.last().cloned().unwrap_or_default();
                    let group = matches!(tokens.0.get(at + 2), Some(TokenTree::Group(_)));
                    if tokens.is(at + 1, '!') && group {
                        self.say(span, What::Macro(last));
                    } else if tokens.is_arguments(at + 1)
                        || parts.len() > 1
                        || after_dot && tokens.is_call(at + 1)
                    {
                        self.say(span, What::Call(last));
                    }
                    self.say_path(span, parts, None);
                }
                TokenTree::Punct(_) | TokenTree::Literal(_) => {}
            }
            at += 1;
        }
    }

    fn within(&mut self, test: bool, constant: bool, read: impl FnOnce(&mut Self)) {
        let before = (self.test, self.constant);
        self.test |= test;
        self.constant |= constant;
        read(self);
        (self.test, self.constant) = before;
    }
}

impl<'ast> Visit<'ast> for Reader {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let constant = matches!(item, syn::Item::Const(_) | syn::Item::Static(_));
        self.within(is_for_tests(attributes(item)), constant, |reader| {
            visit::visit_item(reader, item);
        });
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.within(is_for_tests(&item.attrs), false, |reader| {
            visit::visit_impl_item_fn(reader, item);
        });
    }

    fn visit_expr_const(&mut self, block: &'ast syn::ExprConst) {
        self.within(false, true, |reader| visit::visit_expr_const(reader, block));
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        self.path.push(item.ident.to_string());
        visit::visit_item_mod(self, item);
        self.path.pop();
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        for attribute in &item.attrs {
            self.visit_attribute(attribute);
        }
        for (path, name) in imports(item) {
            self.say_path(item.span(), path, Some(name));
        }
    }

    fn visit_item_static(&mut self, item: &'ast syn::ItemStatic) {
        let mut words = Vec::new();
        if matches!(item.mutability, syn::StaticMutability::Mut(_)) {
            words.push("mut".to_owned());
        }
        let mut reader = TypeWords(&mut words);
        reader.visit_type(&item.ty);
        let name = item.ident.to_string();
        self.say(item.span(), What::Static { name, words });
        visit::visit_item_static(self, item);
    }

    fn visit_signature(&mut self, signature: &'ast syn::Signature) {
        let name = signature.ident.to_string();
        self.say(signature.ident.span(), What::Function(name));
        visit::visit_signature(self, signature);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.say_path(path.span(), parts(path), None);
        visit::visit_path(self, path);
    }

    fn visit_expr_path(&mut self, expression: &'ast syn::ExprPath) {
        if let Some(last) = expression.path.segments.last() {
            self.say(expression.span(), What::Call(last.ident.to_string()));
        }
        visit::visit_expr_path(self, expression);
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        self.say(call.method.span(), What::Call(call.method.to_string()));
        visit::visit_expr_method_call(self, call);
    }

    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        if let Some(last) = item.path.segments.last() {
            let name = last.ident.to_string();
            if name == "cfg" {
                let mut words = Vec::new();
                collect_words(item.tokens.clone(), &mut words);
                self.say(item.span(), What::Cfg(words));
            }
            self.say(item.span(), What::Macro(name));
        }
        self.visit_path(&item.path);
        self.say_tokens(item.tokens.clone());
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        let path = attribute.path();
        if path.is_ident("cfg") || path.is_ident("cfg_attr") {
            let words = words_of_attribute(attribute);
            self.say(attribute.span(), What::Cfg(words));
        }
        let words = words_of_attribute(attribute);
        let lifts = |word: &String| matches!(&**word, "allow" | "expect" | "warn");
        if (path.is_ident("allow")
            || path.is_ident("expect")
            || path.is_ident("warn")
            || (path.is_ident("cfg_attr") && words.iter().any(lifts)))
            && words.iter().any(|word| word == "unsafe_code")
        {
            self.say(attribute.span(), What::AllowsUnsafe);
        }
    }
}

struct TypeWords<'a>(&'a mut Vec<String>);

impl<'ast> Visit<'ast> for TypeWords<'_> {
    fn visit_ident(&mut self, ident: &'ast proc_macro2::Ident) {
        self.0.push(ident.to_string());
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn read(path: &[&str], text: &str) -> Vec<Mention> {
        let path = path.iter().map(|part| (*part).to_owned()).collect();
        let module = Module::parse(Path::new("test.rs"), path, false, text.to_owned());
        mentions(&module.expect("Rust"))
    }

    fn inside(path: &[&str], text: &str) -> Vec<String> {
        read(path, text)
            .into_iter()
            .filter_map(|mention| match mention.what {
                What::Inside { path, .. } => Some(path.join("::")),
                _ => None,
            })
            .collect()
    }

    #[test]
    fn paths_are_found_wherever_they_stand() {
        for text in [
            "use crate::pool::Block;",
            "use crate::{own::Mapping, pool::{self, Block}};",
            "use crate::pool as water;",
            "use crate::pool::*;",
            "pub(crate) use crate::pool::Block as B;",
            "fn f(x: crate::pool::Block) {}",
            "fn f() -> Vec<Option<crate::pool::Block>> { g() }",
            "fn f() { crate::pool::drain(); }",
            "fn f() { let g = crate::pool::drain; }",
            "fn f(x: u8) { match x { crate::pool::FULL => {}, _ => {} } }",
            "impl crate::pool::Hook for X {}",
            "fn f<T: crate::pool::Hook>() {}",
            "fn f() { println!(\"{}\", crate::pool::drain()); }",
            "macro_rules! m { () => { $crate::pool::drain() } }",
            "mod inner { use super::super::pool::Block; }",
            "fn f() { use super::pool::Block; }",
            "fn f() { <crate::pool::Block as Drop>::drop(x) }",
        ] {
            let found = inside(&["region"], text);
            assert!(
                found.iter().any(|path| path.starts_with("pool")),
                "{text}: {found:?}"
            );
        }
    }

    #[test]
    fn own_names_are_relative() {
        assert_eq!(
            inside(&["pool", "core"], "use super::slot::Slot;"),
            ["pool::slot::Slot"]
        );
        assert_eq!(
            inside(&["pool"], "use self::slot::Slot;"),
            ["pool::slot::Slot"]
        );
        assert_eq!(inside(&["pool"], "use super::*;"), ["*"]);
        assert_eq!(
            inside(&["pool"], "use std::fmt; fn f() { Vec::new(); }"),
            [""; 0]
        );
    }

    #[test]
    fn tests_are_told_apart() {
        let text = "#[cfg(test)] mod tests { fn f() { x.unwrap() } }
                    #[cfg(not(test))] mod rest { fn f() { x.unwrap() } }
                    #[test] fn t() { x.unwrap() }
                    impl X { #[cfg(test)] fn t() { x.unwrap() } fn u() { x.unwrap() } }";
        let unwraps: Vec<bool> = read(&[], text)
            .into_iter()
            .filter(|mention| mention.what == What::Call("unwrap".into()))
            .map(|mention| mention.test)
            .collect();
        assert_eq!(unwraps, [true, false, true, true, false]);
    }

    #[test]
    fn macros_hide_nothing() {
        let found = read(
            &[],
            "fn f() { assert_eq!(x.unwrap(), todo!(), [std::env::var(\"X\")]) }",
        );
        let has = |what: What| found.iter().any(|mention| mention.what == what);
        assert!(has(What::Macro("assert_eq".into())));
        assert!(has(What::Macro("todo".into())));
        assert!(has(What::Call("unwrap".into())));
        assert!(has(What::Outside(vec![
            "std".into(),
            "env".into(),
            "var".into()
        ])));
    }
}
