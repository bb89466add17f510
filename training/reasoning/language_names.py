"""Names of the 139 languages that py3langid 0.4 knows: code, English name, native name, further names.

A star marks a rare one.
"""

TABLE = """
ace* | Acehnese | Bahsa Acèh
af | Afrikaans
am | Amharic | አማርኛ
an* | Aragonese | aragonés
ar | Arabic | العربية | Modern Standard Arabic
ary* | Moroccan Arabic | الدارجة | Darija
arz* | Egyptian Arabic | مصرى
as | Assamese | অসমীয়া
az | Azerbaijani | azərbaycanca | azərbaycan dili | Azeri
ba | Bashkir | башҡортса
bcl* | Central Bikol | Bikol Sentral | Bikol
be | Belarusian | беларуская
bg | Bulgarian | български
bn | Bengali | বাংলা | Bangla
br | Breton | brezhoneg
bs | Bosnian | bosanski
ca | Catalan | català | Valencian
crh* | Crimean Tatar | qırımtatarca
cs | Czech | čeština | česky
cy | Welsh | Cymraeg
da | Danish | dansk
de | German | Deutsch
dz* | Dzongkha | རྫོང་ཁ
el | Greek | Ελληνικά | Modern Greek
en | English
eo | Esperanto
es | Spanish | español | castellano | Castilian
et | Estonian | eesti
eu | Basque | euskara
ext* | Extremaduran | estremeñu
fa | Persian | فارسی | Farsi
fi | Finnish | suomi
fo* | Faroese | føroyskt
fr | French | français
fuv* | Nigerian Fulfulde | Fulfulde
fy | West Frisian | Frysk | Frisian
ga | Irish | Gaeilge
gcf* | Guadeloupean Creole | kréyòl gwadloup
gcr* | Guianese Creole | kriyòl gwiyannen
gd | Scottish Gaelic | Gàidhlig
gl | Galician | galego
gom* | Goan Konkani | कोंकणी | Konkani
grc* | Ancient Greek | ἑλληνική
gu | Gujarati | ગુજરાતી
gug* | Paraguayan Guarani | avañe'ẽ | Guarani
guw* | Gun | gungbe
ha | Hausa
hbo* | Biblical Hebrew | Ancient Hebrew
he | Hebrew | עברית
hi | Hindi | हिन्दी | हिंदी
hr | Croatian | hrvatski
ht | Haitian Creole | kreyòl ayisyen | Haitian
hu | Hungarian | magyar
hy | Armenian | հայերեն
id | Indonesian | Bahasa Indonesia
ig | Igbo
is | Icelandic | íslenska
it | Italian | italiano
ja | Japanese | 日本語
jv | Javanese | basa Jawa
ka | Georgian | ქართული
kab* | Kabyle | taqbaylit
kik* | Kikuyu | Gĩkũyũ
kk | Kazakh | қазақша | қазақ тілі
km | Khmer | ខ្មែរ | ភាសាខ្មែរ | Cambodian
kn | Kannada | ಕನ್ನಡ
ko | Korean | 한국어
ku | Kurdish | kurdî | Kurmanji
ky | Kyrgyz | кыргызча
la* | Latin | latina
lb | Luxembourgish | Lëtzebuergesch
lg | Ganda | Luganda
lij* | Ligurian | ligure
ln | Lingala | lingála
lo | Lao | ລາວ | Laotian
lt | Lithuanian | lietuvių
ltg* | Latgalian | latgaļu
lv | Latvian | latviešu
mg | Malagasy | malagasy
mk | Macedonian | македонски
ml | Malayalam | മലയാളം
mn | Mongolian | монгол
mr | Marathi | मराठी
ms | Malay | Bahasa Melayu
mt | Maltese | Malti
my | Burmese | မြန်မာဘာသာ | Myanmar
ne | Nepali | नेपाली
nl | Dutch | Nederlands | Flemish
nn* | Norwegian Nynorsk | nynorsk
no | Norwegian | norsk | Norwegian Bokmål | bokmål | nb
nso* | Northern Sotho | Sesotho sa Leboa | Sepedi | Pedi
oc* | Occitan
om | Oromo | Afaan Oromoo
or | Odia | ଓଡ଼ିଆ | Oriya
pa | Punjabi | ਪੰਜਾਬੀ | Panjabi
pcm* | Nigerian Pidgin | Naijá
pl | Polish | polski
ps | Pashto | پښتو
pt | Portuguese | português | Brazilian Portuguese
qu | Quechua | Runasimi
ro | Romanian | română | Moldovan
ru | Russian | русский
rw | Kinyarwanda | Ikinyarwanda
sa* | Sanskrit | संस्कृतम्
sdh* | Southern Kurdish | کوردی خوارین
se* | Northern Sami | davvisámegiella
si | Sinhala | සිංහල | Sinhalese
sk | Slovak | slovenčina
sl | Slovenian | slovenščina | Slovene
sn | Shona | chiShona
so | Somali | Soomaali
sq | Albanian | shqip
sr | Serbian | српски | srpski
st | Southern Sotho | Sesotho | Sotho
sv | Swedish | svenska
sw | Swahili | Kiswahili
ta | Tamil | தமிழ்
te | Telugu | తెలుగు
tg | Tajik | тоҷикӣ
th | Thai | ไทย | ภาษาไทย
tk | Turkmen | türkmençe
tl | Tagalog | Filipino | fil
tr | Turkish | Türkçe
tt | Tatar | татарча
ug | Uyghur | ئۇيغۇرچە
uk | Ukrainian | українська
ur | Urdu | اردو
uz | Uzbek | oʻzbekcha
uzs* | Southern Uzbek | اۉزبېکچه
vec* | Venetian | vèneto
vi | Vietnamese | Tiếng Việt
vo* | Volapük
wa* | Walloon | walon
wuu* | Wu Chinese | 吴语 | Shanghainese
xh | Xhosa | isiXhosa
yo | Yoruba | Yorùbá
yue* | Cantonese | 粵語 | 粤语 | 廣東話
zh | Chinese | 中文 | Mandarin | 普通话 | 汉语 | Simplified Chinese | Traditional Chinese
zu | Zulu | isiZulu
"""

_LINES = [line.split(" | ") for line in TABLE.strip().splitlines()]

NAMES = {code.rstrip("*"): names for code, *names in _LINES}
"""Code -> names, the English one first."""

RARE = frozenset(code.rstrip("*") for code, *_ in _LINES if code.endswith("*"))
"""Varieties that shadow a more widely written neighbour, and ancient languages."""
