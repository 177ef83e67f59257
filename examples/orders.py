"""The quickstart's task: free-text orders in, strict JSON out. Nothing in one half of the data occurs in the other."""

import json
import random

TRAINED = {
    "kinds": "red blue small large wooden plastic cheap round heavy striped cotton steel yellow brown tall thin soft old modern",
    "things": "chair lamp mug pillow table hammer blanket pencil bottle helmet basket mirror candle jacket printer ladder towel rug",
    "first": "Anna Bob Carla David Emma Frank Grace Hugo Irene James Karen Luis Maria Nadia Oscar Paula Ravi Sara Tom Wei",
    "last": "Adams Baker Costa Diaz Evans Fischer Garcia Hill Ivanov Jones King Lopez Meyer Novak Olsen Patel Rossi Smith Tanaka",
    "cities": "Paris London Berlin Madrid Vienna Tokyo Boston Chicago Dallas Cairo Delhi Prague Dublin Athens Lima Seoul Toronto "
    "Helsinki Bratislava Ljubljana Montevideo Kathmandu Tbilisi Reykjavik Casablanca Jakarta Bogota Hamburg Stuttgart Rotterdam "
    "Antwerp Marseille Valencia Naples Bologna Salzburg Gdansk Riga Vilnius Tallinn Sofia Bucharest Belgrade Zagreb Ankara Izmir "
    "Tehran Lahore Mumbai Chennai Hanoi Manila Osaka Perth Auckland Lagos Accra Dakar Tunis Quito Caracas Havana Ottawa Calgary",
    "phrasings": "{name} would like {count} {item}s sent to {city}.|Please ship {count} {item}s to {name} in {city}.|"
    "Hello, this is {name} from {city}, I need {count} {item}s.|{count} {item}s for {name}, {city}.|"
    "Deliver to {city}: {count} {item}s, customer {name}.|I am {name} and I want to buy {count} {item}s. My city is {city}.|"
    "Our client {name} ordered {count} {item}s; destination {city}.|Can you send {name} {count} {item}s? I live in {city}.|"
    "New order from {city}: {name} takes {count} {item}s.|To {city}, please, {count} {item}s. Regards, {name}|"
    "{name} in {city} is asking for {count} {item}s.|We need {count} {item}s in {city}, the invoice goes to {name}.",
}
HELD_OUT = {
    "kinds": "green golden leather tiny square black glass warm",
    "things": "bowl carpet guitar kettle spoon tent umbrella backpack",
    "first": "Alice Boris Chen Diana Ethan Julia Peter Zoe",
    "last": "Brown Clark Moreau Nguyen Silva Taylor Weber Wilson",
    "cities": "Lisbon Oslo Munich Denver Nairobi Milan Seattle Krakow Geneva Melbourne",
    "phrasings": "Put {count} {item}s on the truck to {city} for {name}.|{name} wrote from {city}: {count} {item}s as soon as possible.|"
    "Good morning, could {count} {item}s reach {city} by Friday? Thanks, {name}|"
    "{name} has paid for {count} {item}s, to be picked up in {city}.|Customer: {name}. Wanted: {count} {item}s. Where: {city}.",
}


def orders(half: dict[str, str], n: int, seed: int) -> list[dict[str, str]]:
    """n rows drawn from one half, in the prompt and completion columns that TRL reads. Every fourth number is held out."""
    draw, rows = random.Random(seed), []
    words = {key: text.split("|" if key == "phrasings" else " ") for key, text in half.items()}
    counts = [count for count in range(2, 100) if (count % 4 == 0) == (half is HELD_OUT)]
    for _ in range(n):
        pick = {key: draw.choice(choices) for key, choices in words.items()}
        item, name, count = f"{pick['kinds']} {pick['things']}", f"{pick['first']} {pick['last']}", draw.choice(counts)
        text = pick["phrasings"].format(item=item, name=name, count=count, city=pick["cities"])
        answer = {"item": item, "quantity": count, "customer": name, "city": pick["cities"]}
        rows.append({"prompt": f"Order: {text}\nJSON:", "completion": " " + json.dumps(answer)})
    return rows
