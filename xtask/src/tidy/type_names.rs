//! No type name stands twice in a crate, so that a name in an error, a log line or a search means one thing.
//! In: parsed sources. Out: a finding at every definition after the first.
//! Types are structs, enums, unions, traits and aliases, public or not; test code is left out.

use std::collections::BTreeMap;

use syn::visit::{self, Visit};

use super::syntax::{RustSource, is_test_only, line_of};
use super::tree::Finding;

/// Checks the type names of each crate.
pub fn check(sources: &[RustSource]) -> Vec<Finding> {
    let mut seen: BTreeMap<(&str, String), (&str, usize)> = BTreeMap::new();
    let mut findings = Vec::new();
    for source in sources {
        let mut visitor = Types::default();
        visitor.visit_file(&source.ast);
        for (name, line) in visitor.names {
            if let Some((path, first)) = seen.get(&(source.package.as_str(), name.clone())) {
                let message = format!("the type name `{name}` stands in {path}:{first} already");
                findings.push(Finding::new(&source.path, line, message));
            } else {
                seen.insert((&source.package, name), (&source.path, line));
            }
        }
    }
    findings
}

#[derive(Default)]
struct Types {
    names: Vec<(String, usize)>,
}

impl Types {
    fn add(&mut self, attributes: &[syn::Attribute], name: &syn::Ident) {
        if !is_test_only(attributes) {
            self.names.push((name.to_string(), line_of(name)));
        }
    }
}

impl<'ast> Visit<'ast> for Types {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test_only(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !is_test_only(&item.attrs) {
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.add(&item.attrs, &item.ident);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.add(&item.attrs, &item.ident);
    }

    fn visit_item_union(&mut self, item: &'ast syn::ItemUnion) {
        self.add(&item.attrs, &item.ident);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.add(&item.attrs, &item.ident);
    }

    fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
        self.add(&item.attrs, &item.ident);
    }
}

#[cfg(test)]
mod tests {
    use super::super::syntax::parse_test_tree;
    use super::*;

    fn places(files: &[(&str, &str)]) -> Vec<String> {
        check(&parse_test_tree(files)).iter().map(|found| format!("{}:{}", found.path, found.line)).collect()
    }

    #[test]
    fn a_type_name_stands_once_in_a_crate() {
        let first = ("crates/wire/src/a.rs", "pub struct Header;\n");
        assert_eq!(
            places(&[first, ("crates/wire/src/b.rs", "\nenum Header {}\n")]),
            ["crates/wire/src/b.rs:2"]
        );
        assert_eq!(places(&[first, ("crates/base/src/b.rs", "enum Header {}\n")]), [""; 0]);
        assert_eq!(
            places(&[first, ("crates/wire/src/b.rs", "type Header = u8;\n")]),
            ["crates/wire/src/b.rs:1"]
        );
    }

    #[test]
    fn test_code_and_associated_types_are_free() {
        let first = ("crates/wire/src/a.rs", "pub struct Header;\n");
        let test = ("crates/wire/src/b.rs", "#[cfg(test)]\nmod tests {\n    struct Header;\n}\n");
        let associated = ("crates/wire/src/c.rs", "impl A for B {\n    type Header = u8;\n}\n");
        assert_eq!(places(&[first, test, associated]), [""; 0]);
    }
}
