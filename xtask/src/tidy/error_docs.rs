//! Every public function that returns a `Result` says under `# Errors` what fails with what.
//! In: parsed sources. Out: findings at the function.
//! Implementations of traits are left out, since the trait documents them; so are functions that are not `pub`.

use syn::visit::{self, Visit};

use super::syntax::{RustSource, is_test_only, line_of};
use super::tree::Finding;

/// Checks the functions of all sources.
pub fn check(sources: &[RustSource]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for source in sources {
        let mut visitor = Functions { path: &source.path, findings: &mut findings };
        visitor.visit_file(&source.ast);
    }
    findings
}

struct Functions<'a> {
    path: &'a str,
    findings: &'a mut Vec<Finding>,
}

impl Functions<'_> {
    fn check(&mut self, attributes: &[syn::Attribute], signature: &syn::Signature) {
        if returns_result(&signature.output) && !has_errors_section(attributes) {
            self.findings.push(Finding::new(
                self.path,
                line_of(&signature.ident),
                format!(
                    "`{}` returns a Result: its documentation needs a section `# Errors`",
                    signature.ident
                ),
            ));
        }
    }
}

impl<'ast> Visit<'ast> for Functions<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test_only(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if is_public(&item.vis) && !is_test_only(&item.attrs) {
            self.check(&item.attrs, &item.sig);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        if item.trait_.is_none() && !is_test_only(&item.attrs) {
            visit::visit_item_impl(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if is_public(&item.vis) && !is_test_only(&item.attrs) {
            self.check(&item.attrs, &item.sig);
        }
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        if is_public(&item.vis) {
            visit::visit_item_trait(self, item);
        }
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        self.check(&item.attrs, &item.sig);
    }
}

fn is_public(visibility: &syn::Visibility) -> bool {
    matches!(visibility, syn::Visibility::Public(_))
}

/// `Result<…>`, `io::Result<…>`, `fmt::Result`; a Result within another type is the caller's to look into.
fn returns_result(output: &syn::ReturnType) -> bool {
    let syn::ReturnType::Type(_, returned) = output else { return false };
    let syn::Type::Path(path) = returned.as_ref() else { return false };
    path.path.segments.last().is_some_and(|last| last.ident == "Result")
}

fn has_errors_section(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let syn::Meta::NameValue(pair) = &attribute.meta else { return false };
        let syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) = &pair.value else { return false };
        pair.path.is_ident("doc") && text.value().lines().any(|line| line.trim() == "# Errors")
    })
}

#[cfg(test)]
mod tests {
    use super::super::syntax::parse_test_tree;
    use super::*;

    const NONE: [usize; 0] = [];

    fn lines(text: &str) -> Vec<usize> {
        let sources = parse_test_tree(&[("crates/wire/src/pdu.rs", text)]);
        check(&sources).into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn a_public_function_that_fails_says_how() {
        assert_eq!(lines("/// Reads.\npub fn read() -> io::Result<()> { Ok(()) }\n"), [2]);
        assert_eq!(
            lines("/// Reads.\n///\n/// # Errors\n/// When it ends.\npub fn read() -> Result<(), E> {}\n"),
            NONE
        );
        assert_eq!(lines("impl A {\n    /// Reads.\n    pub async fn read() -> Result<(), E> {}\n}\n"), [3]);
        assert_eq!(lines("pub trait A {\n    /// Reads.\n    fn read() -> Result<(), E>;\n}\n"), [3]);
    }

    #[test]
    fn private_functions_implementations_and_tests_are_free() {
        assert_eq!(lines("fn read() -> Result<(), E> {}\npub(crate) fn open() -> Result<(), E> {}\n"), NONE);
        assert_eq!(lines("impl fmt::Display for A {\n    fn fmt() -> fmt::Result {}\n}\n"), NONE);
        assert_eq!(lines("#[cfg(test)]\nmod tests {\n    pub fn read() -> Result<(), E> {}\n}\n"), NONE);
        assert_eq!(lines("/// Counts.\npub fn count() -> usize { 0 }\n"), NONE);
    }
}
