//! XML as a tree, with the place of each element in its text.

use std::ops::Range;

use quick_xml::XmlVersion;
use quick_xml::escape::resolve_predefined_entity;
use quick_xml::events::{BytesStart, Event};
use quick_xml::name::ResolveResult;
use quick_xml::reader::NsReader;
use quick_xml::writer::Writer;

/// Longest text that is read, in bytes. A domain with hundreds of devices takes a tenth of it.
pub const TEXT_BYTES_MAX: usize = 4 << 20;
/// Deepest nesting; libvirt's own elements are less than ten deep.
const DEPTH_MAX: usize = 64;

/// The text of what `write` writes, indented by two spaces, with its last line ended.
pub(crate) fn to_text(write: impl FnOnce(&mut Writer<Vec<u8>>) -> std::io::Result<()>) -> String {
    let mut writer = Writer::new_with_indent(Vec::new(), b' ', 2);
    // Writing into a vector fails only where memory does.
    write(&mut writer).expect("a vector takes what is written");
    let mut text = String::from_utf8_lossy(&writer.into_inner()).into_owned();
    text.push('\n');
    text
}

/// Why a text is not read.
#[derive(Debug, thiserror::Error)]
pub enum XmlError {
    /// Not well-formed.
    #[error("it is not XML: {0}")]
    Syntax(String),
    /// Nothing but space and comments.
    #[error("it has no XML element")]
    Empty,
    /// Beyond [`TEXT_BYTES_MAX`] or [`DEPTH_MAX`].
    #[error("it is longer or deeper than any domain's XML")]
    TooLarge,
    /// A document type definition, which no XML of libvirt's has.
    #[error("it has a document type definition")]
    DocumentType,
}

/// An element.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Element {
    /// Its name without a prefix.
    pub name: String,
    /// The URI of its namespace.
    pub namespace: Option<String>,
    /// Attributes without a prefix, in order.
    attributes: Vec<(String, String)>,
    /// Elements in it.
    pub children: Vec<Element>,
    /// The text directly in it, without space around.
    pub text: String,
    /// Where it is in the text that was read.
    pub range: Range<usize>,
}

impl Element {
    /// Reads a document.
    pub fn parse(text: &str) -> Result<Self, XmlError> {
        if text.len() > TEXT_BYTES_MAX {
            return Err(XmlError::TooLarge);
        }
        let mut reader = NsReader::from_str(text);
        let mut open: Vec<Element> = Vec::new();
        let mut root = None;
        loop {
            let begin = position(&reader);
            let (namespace, event) = reader.read_resolved_event().map_err(syntax)?;
            let namespace = match namespace {
                ResolveResult::Bound(uri) => {
                    Some(String::from_utf8_lossy(uri.into_inner()).into_owned())
                }
                ResolveResult::Unbound | ResolveResult::Unknown(_) => None,
            };
            let mut closed = None;
            match event {
                Event::Start(start) => {
                    if open.len() == DEPTH_MAX {
                        return Err(XmlError::TooLarge);
                    }
                    open.push(begun(&start, namespace, begin)?);
                }
                Event::Empty(start) => closed = Some(begun(&start, namespace, begin)?),
                Event::End(_) => closed = open.pop(),
                Event::Text(piece) => push(&mut open, &piece.xml10_content().map_err(syntax)?),
                Event::CData(piece) => push(&mut open, &piece.xml10_content().map_err(syntax)?),
                Event::GeneralRef(name) => match name.resolve_char_ref().map_err(syntax)? {
                    Some(c) => push(&mut open, c.encode_utf8(&mut [0; 4])),
                    None => {
                        let name = name.decode().map_err(syntax)?;
                        let known = resolve_predefined_entity(&name);
                        let known =
                            known.ok_or_else(|| XmlError::Syntax(format!("unknown &{name};")))?;
                        push(&mut open, known);
                    }
                },
                Event::DocType(_) => return Err(XmlError::DocumentType),
                Event::Comment(_) | Event::Decl(_) | Event::PI(_) => {}
                Event::Eof => break,
            }
            if let Some(mut element) = closed {
                element.range.end = position(&reader);
                element.text = element.text.trim().to_owned();
                match open.last_mut() {
                    Some(parent) => parent.children.push(element),
                    None if root.is_none() => root = Some(element),
                    None => return Err(XmlError::Syntax("more than one document".to_owned())),
                }
            }
        }
        match open.pop() {
            Some(element) => Err(XmlError::Syntax(format!("<{}> has no end", element.name))),
            None => root.ok_or(XmlError::Empty),
        }
    }

    /// The value of an attribute.
    pub fn attribute(&self, name: &str) -> Option<&str> {
        let mut found = self.attributes.iter().filter(|(key, _)| key == name);
        found.next().map(|(_, value)| value.as_str())
    }

    /// Elements of this name directly in it, outside of any namespace.
    pub fn children<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a Element> {
        let named = move |child: &&Element| child.namespace.is_none() && child.name == name;
        self.children.iter().filter(named)
    }

    /// The first element at a path of names below it.
    pub fn find(&self, path: &[&str]) -> Option<&Element> {
        match path {
            [] => Some(self),
            [first, rest @ ..] => self.children(first).find_map(|child| child.find(rest)),
        }
    }

    /// The value of an attribute of the first element at a path.
    pub fn find_attribute(&self, path: &[&str], name: &str) -> Option<&str> {
        self.find(path)?.attribute(name)
    }

    /// This element and all below it.
    pub fn each<'a>(&'a self, visit: &mut dyn FnMut(&'a Element)) {
        visit(self);
        for child in &self.children {
            child.each(visit);
        }
    }
}

fn begun(
    start: &BytesStart<'_>,
    namespace: Option<String>,
    begin: usize,
) -> Result<Element, XmlError> {
    let mut attributes = Vec::new();
    for attribute in start.attributes() {
        let attribute = attribute.map_err(syntax)?;
        if attribute.key.prefix().is_none() {
            let name = String::from_utf8_lossy(attribute.key.local_name().into_inner());
            let value = attribute.normalized_value(XmlVersion::Implicit1_0);
            attributes.push((name.into_owned(), value.map_err(syntax)?.into_owned()));
        }
    }
    Ok(Element {
        name: String::from_utf8_lossy(start.local_name().into_inner()).into_owned(),
        namespace,
        attributes,
        range: begin..begin,
        ..Element::default()
    })
}

fn push(open: &mut [Element], piece: &str) {
    if let Some(element) = open.last_mut() {
        element.text.push_str(piece);
    }
}

fn position(reader: &NsReader<&[u8]>) -> usize {
    // A text is shorter than TEXT_BYTES_MAX.
    usize::try_from(reader.buffer_position()).unwrap_or(usize::MAX)
}

fn syntax(error: impl std::fmt::Display) -> XmlError {
    XmlError::Syntax(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_has_names_values_and_places() {
        let text = "<?xml version='1.0'?>\n<a x='1 &amp; 2'><!-- c --><b> t&lt;&#65; </b>\n<p:c \
                    xmlns:p='urn:x' v=\"3\"/></a>";
        let a = Element::parse(text).unwrap();
        assert_eq!(a.attribute("x"), Some("1 & 2"));
        let b = a.find(&["b"]).unwrap();
        assert_eq!(
            (&text[b.range.clone()], b.text.as_str()),
            ("<b> t&lt;&#65; </b>", "t<A")
        );
        let c = &a.children[1];
        assert_eq!(
            (c.name.as_str(), c.namespace.as_deref()),
            ("c", Some("urn:x"))
        );
        assert_eq!(
            (c.attribute("v"), c.attribute("xmlns:p")),
            (Some("3"), None)
        );
        assert!(a.find(&["c"]).is_none(), "it has a namespace");
        assert!(text[c.range.clone()].starts_with("<p:c "));
    }

    #[test]
    fn what_is_not_xml_is_refused_in_one_line() {
        let deep = "<a>".repeat(DEPTH_MAX + 1);
        let long = " ".repeat(TEXT_BYTES_MAX + 1);
        for text in [
            "",
            "  \n",
            "garbage",
            "<a>",
            "<a></b>",
            "<a/><b/>",
            "<a x=1/>",
            "<a>&nbsp;</a>",
            "<!DOCTYPE a [<!ENTITY b \"c\">]><a>&b;</a>",
            &deep,
            &long,
        ] {
            let error = Element::parse(text).unwrap_err().to_string();
            assert!(!error.is_empty() && !error.contains('\n'), "{error}");
        }
    }
}
