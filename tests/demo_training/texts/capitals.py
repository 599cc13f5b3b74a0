"""Capitals of the world's countries, asked in many ways and in both directions."""

from random import Random

from tests.demo_training.examples import Exchange, exchange
from tests.demo_training.texts.wording import carelessly

_TABLE = """
Afghanistan=Kabul;Albania=Tirana;Algeria=Algiers;Andorra=Andorra la Vella;Angola=Luanda;
Antigua and Barbuda=Saint John's;
Argentina=Buenos Aires;Armenia=Yerevan;Australia=Canberra;Austria=Vienna;Azerbaijan=Baku;the Bahamas=Nassau;
Bahrain=Manama;Bangladesh=Dhaka;Barbados=Bridgetown;Belarus=Minsk;Belgium=Brussels;Belize=Belmopan;Benin=Porto-Novo;
Bhutan=Thimphu;Bolivia=Sucre;Bosnia and Herzegovina=Sarajevo;Botswana=Gaborone;Brazil=Brasília;
Brunei=Bandar Seri Begawan;Bulgaria=Sofia;Burkina Faso=Ouagadougou;Burundi=Gitega;Cambodia=Phnom Penh;
Cameroon=Yaoundé;Canada=Ottawa;Cape Verde=Praia;the Central African Republic=Bangui;Chad=N'Djamena;Chile=Santiago;
China=Beijing;Colombia=Bogotá;the Comoros=Moroni;the Republic of the Congo=Brazzaville;
the Democratic Republic of the Congo=Kinshasa;Costa Rica=San José;Croatia=Zagreb;Cuba=Havana;Cyprus=Nicosia;
the Czech Republic=Prague;Denmark=Copenhagen;Djibouti=Djibouti City;Dominica=Roseau;
the Dominican Republic=Santo Domingo;East Timor=Dili;Ecuador=Quito;Egypt=Cairo;El Salvador=San Salvador;
Equatorial Guinea=Malabo;Eritrea=Asmara;Estonia=Tallinn;Eswatini=Mbabane;Ethiopia=Addis Ababa;Fiji=Suva;
Finland=Helsinki;France=Paris;Gabon=Libreville;the Gambia=Banjul;Georgia=Tbilisi;Germany=Berlin;Ghana=Accra;
Greece=Athens;Grenada=Saint George's;Guatemala=Guatemala City;Guinea=Conakry;Guinea-Bissau=Bissau;Guyana=Georgetown;
Haiti=Port-au-Prince;Honduras=Tegucigalpa;Hungary=Budapest;Iceland=Reykjavík;India=New Delhi;Indonesia=Jakarta;
Iran=Tehran;Iraq=Baghdad;Ireland=Dublin;Israel=Jerusalem;Italy=Rome;Ivory Coast=Yamoussoukro;Jamaica=Kingston;
Japan=Tokyo;Jordan=Amman;Kazakhstan=Astana;Kenya=Nairobi;Kiribati=South Tarawa;Kosovo=Pristina;Kuwait=Kuwait City;
Kyrgyzstan=Bishkek;Laos=Vientiane;Latvia=Riga;Lebanon=Beirut;Lesotho=Maseru;Liberia=Monrovia;Libya=Tripoli;
Liechtenstein=Vaduz;Lithuania=Vilnius;Luxembourg=Luxembourg City;Madagascar=Antananarivo;Malawi=Lilongwe;
Malaysia=Kuala Lumpur;the Maldives=Malé;Mali=Bamako;Malta=Valletta;the Marshall Islands=Majuro;Mauritania=Nouakchott;
Mauritius=Port Louis;Mexico=Mexico City;Micronesia=Palikir;Moldova=Chișinău;Monaco=Monaco City;Mongolia=Ulaanbaatar;
Montenegro=Podgorica;Morocco=Rabat;Mozambique=Maputo;Myanmar=Naypyidaw;Namibia=Windhoek;Nauru=Yaren;Nepal=Kathmandu;
the Netherlands=Amsterdam;New Zealand=Wellington;Nicaragua=Managua;Niger=Niamey;Nigeria=Abuja;North Korea=Pyongyang;
North Macedonia=Skopje;Norway=Oslo;Oman=Muscat;Pakistan=Islamabad;Palau=Ngerulmud;Palestine=Ramallah;
Panama=Panama City;Papua New Guinea=Port Moresby;Paraguay=Asunción;Peru=Lima;the Philippines=Manila;Poland=Warsaw;
Portugal=Lisbon;Qatar=Doha;Romania=Bucharest;Russia=Moscow;Rwanda=Kigali;Saint Kitts and Nevis=Basseterre;
Saint Lucia=Castries;Saint Vincent and the Grenadines=Kingstown;Samoa=Apia;San Marino=City of San Marino;
São Tomé and Príncipe=São Tomé;Saudi Arabia=Riyadh;Senegal=Dakar;Serbia=Belgrade;Seychelles=Victoria;
Sierra Leone=Freetown;Singapore=Singapore;Slovakia=Bratislava;Slovenia=Ljubljana;the Solomon Islands=Honiara;
Somalia=Mogadishu;South Africa=Pretoria;South Korea=Seoul;South Sudan=Juba;Spain=Madrid;
Sri Lanka=Sri Jayawardenepura Kotte;Sudan=Khartoum;Suriname=Paramaribo;Sweden=Stockholm;Switzerland=Bern;
Syria=Damascus;Taiwan=Taipei;Tajikistan=Dushanbe;Tanzania=Dodoma;Thailand=Bangkok;Togo=Lomé;Tonga=Nuku'alofa;
Trinidad and Tobago=Port of Spain;Tunisia=Tunis;Turkey=Ankara;Turkmenistan=Ashgabat;Tuvalu=Funafuti;Uganda=Kampala;
Ukraine=Kyiv;the United Arab Emirates=Abu Dhabi;the United Kingdom=London;the United States=Washington, D.C.;
Uruguay=Montevideo;Uzbekistan=Tashkent;Vanuatu=Port Vila;Vatican City=Vatican City;Venezuela=Caracas;Vietnam=Hanoi;
Yemen=Sana'a;Zambia=Lusaka;Zimbabwe=Harare
"""
_ENTRIES = (entry.strip().partition("=") for entry in _TABLE.replace("\n", "").split(";"))
CAPITALS: dict[str, str] = {country: capital for country, _, capital in _ENTRIES}
COUNTRIES = tuple(CAPITALS)
ALIASES = {
    "the United States": ("the USA", "the US", "the United States of America", "USA", "America", "United States"),
    "the United Kingdom": ("the UK", "Great Britain", "UK", "United Kingdom"),
    "the Netherlands": ("Holland", "Netherlands"),
    "the Czech Republic": ("Czechia", "Czech Republic"),
    "the United Arab Emirates": ("the UAE", "UAE"),
    "the Philippines": ("Philippines",),
    "the Democratic Republic of the Congo": ("the DRC",),
    "Turkey": ("Türkiye",),
    "Myanmar": ("Burma",),
    "Ivory Coast": ("Côte d'Ivoire",),
    "Vatican City": ("the Vatican",),
    "Cape Verde": ("Cabo Verde",),
    "Eswatini": ("Swaziland",),
}
"""What else people call a country; the answer uses the name that was asked with only where it is the listed one."""

ASKING_CAPITAL = (
    "What is the capital of {}?",
    "What is the capital of {}?",
    "What's the capital of {}?",
    "Which city is the capital of {}?",
    "Tell me the capital of {}.",
    "Can you tell me the capital of {}?",
    "Do you know the capital of {}?",
    "Name the capital of {}.",
    "What city is the capital of {}?",
    "I would like to know the capital of {}.",
    "What is the name of the capital of {}?",
    "What is the capital city of {}?",
    "Give me the capital of {}.",
    "Capital of {}?",
)
ASKING_COUNTRY = (
    "{} is the capital of which country?",
    "Which country has the capital {}?",
    "What country is {} the capital of?",
)


def full_answer(country: str) -> str:
    """The sentence that states the capital, with one full stop even after "Washington, D.C."."""
    return f"The capital of {country} is {CAPITALS[country].removesuffix('.')}."


def ask_capital(rng: Random) -> Exchange:
    """ "What is the capital of France?", in one of its wordings. Held out: wording × country."""
    country = rng.choice(COUNTRIES) if rng.random() < 0.93 else rng.choice(tuple(ALIASES))
    called = rng.choice(ALIASES[country]) if country in ALIASES and rng.random() < 0.6 else country
    question = carelessly(rng, rng.choice(ASKING_CAPITAL).format(called))
    return exchange("capitals", question, question, full_answer(country))


def ask_country(rng: Random) -> Exchange:
    """The other direction: which country a city is the capital of."""
    country = rng.choice(COUNTRIES)
    question = carelessly(rng, rng.choice(ASKING_COUNTRY).format(CAPITALS[country].removesuffix(".")))
    return exchange(
        "capitals", question, question, f"{CAPITALS[country].removesuffix('.')} is the capital of {country}."
    )


def draw(rng: Random) -> Exchange:
    """A question about a capital."""
    return ask_capital(rng) if rng.random() < 0.8 else ask_country(rng)
