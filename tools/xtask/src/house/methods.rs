//! Inherent methods that a file defines and methods that it calls. This module only collects them.
//!
//! The contents of a macro are only tokens, so calls in them are recognized by their form.

use std::collections::BTreeSet;

use proc_macro2::{Span, TokenStream, TokenTree};
use syn::visit::{self, Visit};

use super::tree::Module;
use super::words::{Tokens, attributes, is_for_tests, parts};

/// A function in an `impl` of a type that is not of a trait.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) of: String,
    pub(crate) name: String,
    /// `true` if it takes `self`, so that it can be called as a method.
    pub(crate) method: bool,
    /// `true` if other crates that see its type may call it.
    pub(crate) public: bool,
}

/// The form in which a call names its callee.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    /// `Type::name`.
    Path,
    /// `Self::name`.
    Own,
    /// `.name()`.
    Dot,
}

/// A call of a method or of a type's function.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) line: usize,
    /// The type, if the place of the call determines it.
    pub(crate) of: Option<String>,
    pub(crate) name: String,
    pub(crate) how: How,
}

#[derive(Debug, Default)]
pub(crate) struct Methods {
    pub(crate) functions: Vec<Function>,
    /// The names of functions of traits, and of functions in macros.
    pub(crate) shared: BTreeSet<String>,
    pub(crate) calls: Vec<Call>,
}

/// Returns the methods that a file defines and calls outside tests; none for a file that is only
/// for tests.
pub(crate) fn read(module: &Module) -> Methods {
    let mut reader = Reader::default();
    if !module.test {
        reader.visit_file(&module.syntax);
    }
    reader.found
}

#[derive(Default)]
struct Reader {
    found: Methods,
    /// The type whose `impl` is being read.
    this: Option<String>,
}

impl Reader {
    fn say(&mut self, span: Span, of: Option<String>, name: String, how: How) {
        self.found.calls.push(Call {
            line: span.start().line,
            of,
            name,
            how,
        });
    }

    /// Records the last two parts of a path as a type and its function, if they are that.
    fn say_path(&mut self, span: Span, parts: &[String]) {
        let [.., of, name] = parts else {
            return;
        };
        let (of, how) = match &**of {
            "Self" => (self.this.clone(), How::Own),
            of => (
                of.starts_with(char::is_uppercase).then(|| of.to_owned()),
                How::Path,
            ),
        };
        if of.is_some() {
            self.say(span, of, name.clone(), how);
        }
    }

    /// Reads the tokens of a macro: calls, and functions whose type is not known.
    fn say_tokens(&mut self, tokens: TokenStream) {
        let tokens = Tokens(tokens.into_iter().collect());
        let mut at = 0;
        while let Some(token) = tokens.0.get(at) {
            match token {
                TokenTree::Group(group) => self.say_tokens(group.stream()),
                TokenTree::Ident(ident) => {
                    let before = at.checked_sub(1);
                    let parts = tokens.path(at);
                    at += 3 * (parts.len() - 1);
                    if before.is_some_and(|before| tokens.is_word(before, "fn")) {
                        self.found.shared.insert(ident.to_string());
                    } else if parts.len() > 1 {
                        self.say_path(ident.span(), &parts);
                    } else if before.is_some_and(|before| tokens.is(before, '.'))
                        && tokens.is_call(at + 1)
                    {
                        let own = tokens.is_own(at);
                        let of = self.this.clone().filter(|_| own);
                        self.say(ident.span(), of, ident.to_string(), How::Dot);
                    }
                }
                TokenTree::Punct(_) | TokenTree::Literal(_) => {}
            }
            at += 1;
        }
    }

    fn within(&mut self, this: Option<String>, read: impl FnOnce(&mut Self)) {
        let before = std::mem::replace(&mut self.this, this);
        read(self);
        self.this = before;
    }
}

/// Returns the name of a type without its path and parameters.
fn name_of(of: &syn::Type) -> Option<String> {
    match of {
        syn::Type::Path(of) => of.path.segments.last().map(|last| last.ident.to_string()),
        syn::Type::Reference(of) => name_of(&of.elem),
        syn::Type::Paren(of) => name_of(&of.elem),
        _ => None,
    }
}

impl<'ast> Visit<'ast> for Reader {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        if !is_for_tests(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        let this = name_of(&item.self_ty);
        for part in &item.items {
            let syn::ImplItem::Fn(part) = part else {
                continue;
            };
            if is_for_tests(&part.attrs) {
                continue;
            }
            let name = part.sig.ident.to_string();
            match &this {
                Some(this) if item.trait_.is_none() => self.found.functions.push(Function {
                    of: this.clone(),
                    name,
                    method: part.sig.receiver().is_some(),
                    public: matches!(part.vis, syn::Visibility::Public(_)),
                }),
                _ => {
                    self.found.shared.insert(name);
                }
            }
        }
        self.within(this, |reader| visit::visit_item_impl(reader, item));
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_for_tests(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        for part in &item.items {
            if let syn::TraitItem::Fn(part) = part {
                self.found.shared.insert(part.sig.ident.to_string());
            }
        }
        self.within(None, |reader| visit::visit_item_trait(reader, item));
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        let own =
            matches!(&*call.receiver, syn::Expr::Path(receiver) if receiver.path.is_ident("self"));
        let of = self.this.clone().filter(|_| own);
        self.say(call.method.span(), of, call.method.to_string(), How::Dot);
        visit::visit_expr_method_call(self, call);
    }

    fn visit_expr_path(&mut self, expression: &'ast syn::ExprPath) {
        if let Some(last) = expression.path.segments.last() {
            self.say_path(last.ident.span(), &parts(&expression.path));
        }
        visit::visit_expr_path(self, expression);
    }

    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        self.say_tokens(item.tokens.clone());
    }
}
